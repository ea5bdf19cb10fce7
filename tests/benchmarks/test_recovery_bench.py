"""The bench of in-step recovery measures real deaths, and a recovery that redoes the iteration would miss its bars."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import SMALL, light

from unskew.benchmarks.recovery import in_step, resume, soak
from unskew.benchmarks.recovery.in_step import Death
from unskew.benchmarks.recovery.resume import Chain
from unskew.benchmarks.recovery.torchft import timeline
from unskew.benchmarks.recovery.torchft_job import Attempt, ReplicaKill
from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.collector.paths import Store

BY_THE_BARRIER = next(iter(in_step.DEATHS))


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("forked")
def test_a_death_is_measured_both_ways(tmp_path: Path) -> None:
    options = msgspec.structs.replace(SMALL, device="sleep")
    with bars() as progress:
        found = in_step.figures(
            Bench(progress, Store(tmp_path)), deaths={BY_THE_BARRIER: ("before_barrier", (0,))}, pairs=(), options=options
        )
    ended, losses, once, redone, share, regrouped, _ = found
    assert (ended.value, once.value, redone.value) == (2, 0, 0)
    assert (losses.ok, redone.note) == (True, "redoing 16 of 16; 1 runs each")
    assert share.value is not None
    assert share.value > 0
    assert regrouped.note.endswith("s of 2")


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("forked")
def test_a_soak_strikes_and_nothing_is_lost(tmp_path: Path) -> None:
    options = light(msgspec.structs.replace(SMALL, dp=4, iterations=45, micro_batches=8))
    with bars() as progress:
        found = soak.figures(Bench(progress, Store(tmp_path)), options, seeds=[1])
    assert [one.name for one in found if one.ok is False] == []
    assert all(kind in found[0].note for kind in ("kill", "start"))


def test_what_is_lost_or_left_misses_the_bars() -> None:
    broken = Chain(kills=4, lost=3, redone=3, difference=0.1, not_once=2, replaced=1, orphans=1, problem="exit code 1")
    for whole in (True, False):
        assert {one.ok for one in resume._figures("resume", [broken], whole=whole)} == {False}


def test_redoing_everything_misses_the_bars() -> None:
    redone = [Death(64, 0.6), Death(64, 0.7)]
    found = in_step._compared(BY_THE_BARRIER, {"in-step": redone, "redo": redone}, in_step.OPTIONS)
    assert [one.ok for one in found] == [False, False]


def test_beside_torchft_a_stall_and_what_was_not_trained_are_seen() -> None:
    """Three replicas step once a second; replica 0 is killed in second 5, and back at 10; the others then take 3 and 2 seconds.
    That it was away is no stall when replica 1 is killed."""

    def tried(replica: int, step: int, ended_s: float, replicas: int, *, committed: bool = True) -> Attempt:
        return Attempt(replica=replica, step=step, began_s=ended_s - 1, ended_s=ended_s, committed=committed, replicas=replicas)

    ends = [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 10.0, 11.0, 12.0, 13.0]
    seen = [tried(0, step, end, 3) for step, end in enumerate(ends) if not 4.0 < end < 10.0]
    for other in (1, 2):
        seen += [tried(other, step, end, 2 if 4.0 < end < 10.0 else 3) for step, end in enumerate(ends)]
        seen.append(tried(other, 4, 6.0, 2, committed=False))
    found = timeline(3, seen, [ReplicaKill(replica=0, at_s=4.5), ReplicaKill(replica=1, at_s=10.5)])
    assert (found.usual_s, found.stalls(back=False), found.stalls(back=True)) == (1.0, [2.0, 1.0], [1.0, 0.0])
    assert (found.untrained, found.samples, found.committed, found.tries) == (2, 30, 28, 30)
