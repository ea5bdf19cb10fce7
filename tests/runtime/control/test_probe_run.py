"""Probes in real processes: all ranks of one role turn slow alike and excuse each other, until they are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training.runtime_runs import SMALL, Run, light, train

from unskew.analytics.replay.replay import replay
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    IterationCommitted,
    Note,
    PlanApplied,
    Probed,
    RunFinished,
    RunStarted,
    Span,
    Verdict,
    VerdictClosed,
)
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import send
from unskew.edge.recorded_run import recorded_run

pytestmark = pytest.mark.slow

SLOW = (0, 2, 4)
FAULTS = tuple(f"slow:rank={rank},factor=1.6,at=30" for rank in SLOW)
LIGHT = light(SMALL)
LAYOUT = {"pp": 2, "dp": 3, "micro_batches": 6, "iterations": 60}


def named(run: Run) -> dict[int, Verdict]:
    """The devices that are accused."""
    assert run.of(RunFinished)[-1].status == "done"
    return {party.rank: verdict for verdict in run.of(Verdict) for party in verdict.culprits if party.rank is not None}


@pytest.mark.limit(240)
def test_ranks_that_excuse_each_other_are_probed_and_named(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTS, base=LIGHT, **LAYOUT)
    verdicts = named(run)
    assert sorted(verdicts) == list(SLOW)
    stage, *_ = run.of(Verdict)
    assert stage.cause == "stage_imbalance", "until they are measured, the stage is all that can be named"
    assert [closed.verdict for closed in run.of(VerdictClosed)] == [stage.verdict]
    (probed,) = run.of(Probed)
    assert probed.ranks == SLOW
    assert probed.slowdowns == {str(rank): pytest.approx(1.6, rel=0.01) for rank in SLOW}
    assert 30 < probed.at_iteration <= 50
    assert all(verdict.evidence["test"] == "probe" for verdict in verdicts.values())
    (applied,) = [event for event in run.of(PlanApplied) if event.reason.startswith("probe: ranks 0, 2, 4")]
    assert applied.digest == run.of(PlanApplied)[0].digest
    products = [event for event in run.of(Span) if event.kind == "probe" and event.plan_version == applied.plan_version]
    assert {span.rank for span in products} == set(SLOW)
    assert probed.cost_us == pytest.approx(max(sum(s.wall_us for s in products if s.rank == rank) for rank in SLOW))


def test_in_mode_observe_nothing_is_held_up_for_a_probe(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTS, mode="observe", base=LIGHT, **LAYOUT)
    assert run.of(Probed) == []
    assert len(run.of(PlanApplied)) == 1


@pytest.mark.limit(240)
def test_resihps_detector_validates_its_suspects_and_is_replayed(tmp_path: Path) -> None:
    """A rank is three times as slow from iteration 30 on: its product is measured while the others wait, and it is named."""
    run = train(tmp_path, "slow:rank=2,factor=3,at=30", detector="resihp", base=LIGHT, **LAYOUT)
    assert [event.detector for event in run.of(RunStarted)] == ["resihp"]
    verdicts = named(run)
    assert sorted(verdicts) == [2]
    assert (verdicts[2].evidence["detector"], verdicts[2].evidence["test"]) == ("resihp", "probe")
    assert verdicts[2].speed["F"] == pytest.approx(1 / 3, rel=0.02)
    assert 30 <= verdicts[2].since_iteration <= 32
    assert verdicts[2].at_iteration <= 40
    assert 2 in run.of(Probed)[0].ranks
    assert run.summary.detector == "resihp"
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()


class Person:
    """Asks for a probe of a rank that is there, and of one that is not."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, run: Run, entry: Entry) -> None:
        if isinstance(entry.event, IterationCommitted) and entry.event.iteration == 10 and not self.asked:
            self.asked = True
            for rank in ("9", "3"):
                send(run.store, run.id, Command(kind="probe", run=run.id, target=rank, by="ann", reason="it looks slow"))


def test_who_asks_for_a_probe_gets_it_in_any_mode(tmp_path: Path) -> None:
    run = train(tmp_path, "slow:rank=3,factor=1.6,at=5", mode="observe", on_event=Person(), base=LIGHT, **LAYOUT)
    named(run)
    (probed,) = run.of(Probed)
    assert probed.slowdowns == {"3": pytest.approx(1.6, rel=0.01)}
    (refused,) = run.of(CommandRefused)
    assert (refused.command, refused.by) == ("probe 9", "ann")
    assert refused.reason == "rank 9 is not in the run, its ranks are 0, 1, 2, 3, 4, 5"
    assert [(note.text, note.by) for note in run.of(Note)] == [("rank 3 is to be probed: it looks slow", "ann")]
    assert len({applied.digest for applied in run.of(PlanApplied)}) == 1
