"""A lost rank comes back as a new process, and a new one joins, while the others train on; no digit of the loss changes."""

from __future__ import annotations

import os
import signal
import threading
from functools import reduce
from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import LONG_CHUNKS, Run, light, train

from unskew.analytics.core.plan import Plan
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.diagnosis.failslow import follow_run, settled
from unskew.analytics.replay.replay import replay
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    DeviceJoined,
    DeviceLost,
    IterationCommitted,
    PlanApplied,
    PlanIssued,
    PlanProposed,
    ProcessEnded,
    RankAdded,
    Regrouped,
    RunFinished,
    Verdict,
    VerdictClosed,
)
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import send
from unskew.edge.load_run import load_run
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(240), pytest.mark.slow]
LIGHT = light(msgspec.structs.replace(LONG_CHUNKS, layers=6))
LAYOUT = {"profile": "long", "iterations": 56, "respawns": 3}
MOST_STILL_S = 2.0
"""A join holds the others up for the change of plan alone: 0.03 to 0.2 s on a busy machine of two cores."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("undisturbed"), base=LIGHT, **LAYOUT)


def assert_exact(run: Run, undisturbed: Run) -> None:
    """The run is the undisturbed one, each chunk that counts executed once, and it is decided again from its log."""
    assert run.of(RunFinished)[-1].status == "done", run.of(RunFinished)[-1].reason
    assert run.losses == pytest.approx(undisturbed.losses[: run.options.iterations], rel=0, abs=1e-8)
    assert run.sql("select * from executed($run) where times != 1") == []
    commits = [(event.iteration, event.rank) for event in run.of(IterationCommitted)]
    assert len(commits) == len(set(commits))
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()
        diagnosed = follow_run(load_run(reader, run.id)).findings.verdicts
    assert diagnosed == settled(event for event in run.events if isinstance(event, Verdict | VerdictClosed))


def plan_of(event: PlanIssued | PlanApplied) -> Plan:
    return Plan.from_data(event.plan)


def ranks(run: Run) -> list[tuple[int, ...]]:
    """With a role in each plan that came into force."""
    return [plan_of(event).ranks for event in run.of(PlanApplied)]


def test_a_dead_rank_is_started_again_and_takes_its_layers_from_the_others(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, "kill:rank=2,at=10", base=LIGHT, **LAYOUT)
    assert_exact(run, undisturbed)
    (added,) = run.of(RankAdded)
    assert (added.rank, added.process, added.by) == (2, 2, "auto")
    assert run.same_process == {0, 1, 2, 3}  # the three that lived, and the new one
    assert (ranks(run)[0], ranks(run)[1], ranks(run)[-1]) == ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3))
    back = run.of(Regrouped)[-1]
    assert back.moved_bytes > 0
    assert back.seconds < MOST_STILL_S
    assert run.summary.iteration_s[back.iteration :] == pytest.approx(
        undisturbed.summary.iteration_s[back.iteration :], rel=0.02
    )
    assert {event.attempt for event in run.of(IterationCommitted) if event.iteration > 10} == {0}
    assert [event.verdict for event in run.of(VerdictClosed)] == [1]
    (device,) = run.sql("select state, n_losses from devices where run = $run and rank = 2")
    assert (device["state"], device["n_losses"]) == ("joined", 1)


class Operator:
    """Asks for a rank that lives, for the lost one, and, once that is back, for a new one."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, run: Run, entry: Entry) -> None:
        if (isinstance(entry.event, DeviceLost) and not entry.event.cut_off) or isinstance(entry.event, ProcessEnded):
            self.ask(run, "0")
            self.ask(run, "1")
        elif isinstance(entry.event, PlanApplied) and self.asked == 2 and len(plan_of(entry.event).ranks) == 4:
            self.ask(run, "")

    def ask(self, run: Run, rank: str) -> None:
        self.asked += 1
        send(run.store, run.id, Command(kind="rank", run=run.id, target=rank, by="ann"))


def test_a_hung_rank_is_started_when_somebody_asks_and_a_new_one_joins(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, "hang:rank=1,at=10", base=LIGHT, on_event=Operator(), **{**LAYOUT, "respawns": 0})
    assert_exact(run, undisturbed)
    assert [event.reason for event in run.of(CommandRefused)] == ["rank 0 lives"]
    assert [(event.rank, event.process, event.by) for event in run.of(RankAdded)] == [(1, 2, "ann"), (4, 1, "ann")]
    assert ranks(run)[-1] == (0, 1, 2, 3, 4)
    *answers, newcomer = [event.verdict for event in run.of(PlanProposed)]
    # The loss, the return, and a better plan where regrouping turned out to be quick; the newcomer answers none.
    assert (answers, newcomer) in (([1, 1], None), ([1, 1, 1], None))
    state = reduce(fold, run.events, RunState())
    assert (state.ranks, state.lost, state.open_verdicts) == (5, {}, ())
    assert run.summary.iteration_s[-1] < 0.95 * undisturbed.summary.iteration_s[-1]


def test_a_rank_that_is_stopped_for_a_moment_comes_back_as_itself(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, "freeze:rank=1,at=10,seconds=0.6", base=LIGHT, **LAYOUT)
    assert_exact(run, undisturbed)
    (lost,) = run.of(DeviceLost)
    assert (lost.rank, lost.how, lost.cut_off) == (1, "frozen", True)
    pids = [event.pid for event in run.of(DeviceJoined) if event.rank == 1]
    assert (len(pids), len({*pids}), run.of(RankAdded)) == (2, 1, [])
    assert (ranks(run)[1], ranks(run)[-1]) == ((0, 2, 3), (0, 1, 2, 3))
    assert [event.verdict for event in run.of(VerdictClosed)] == [1]


class Killer:
    """SIGKILLs a rank some time after the plan with the new process was sent to the ranks: around its join."""

    def __init__(self, rank: int, after_s: float) -> None:
        self.rank, self.after_s, self.timer = rank, after_s, None

    def __call__(self, run: Run, entry: Entry) -> None:
        if self.timer is None and isinstance(entry.event, PlanIssued) and run.of(RankAdded) and 2 in plan_of(entry.event).ranks:
            pid = [event.pid for event in run.of(DeviceJoined) if event.rank == self.rank][-1]
            self.timer = threading.Timer(self.after_s, os.kill, (pid, signal.SIGKILL))
            self.timer.start()


@pytest.mark.parametrize(("rank", "after_s"), [(2, 0.06), (1, 0.04)])
def test_a_death_around_the_join_costs_no_digit(rank: int, after_s: float, tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, "kill:rank=2,at=10", base=LIGHT, on_event=Killer(rank, after_s), **{**LAYOUT, "iterations": 52})
    assert_exact(run, undisturbed)
    assert [lost.rank for lost in run.of(DeviceLost)] == [2, rank]


def test_a_rank_on_standby_takes_the_place_of_one_that_dies_within_the_iteration(tmp_path: Path, undisturbed: Run) -> None:
    asked: list[int] = []

    def add_a_rank(run: Run, entry: Entry) -> None:
        if not asked and isinstance(entry.event, IterationCommitted):
            asked.append(entry.event.iteration)
            send(run.store, run.id, Command(kind="rank", run=run.id, target="", by="ann"))

    options = {**LAYOUT, "iterations": 24, "respawns": 0, "mode": "approve"}  # nobody approves a plan with the new rank
    run = train(tmp_path, "kill:rank=1,at=16", base=LIGHT, on_event=add_a_rank, **options)
    assert_exact(run, undisturbed)
    assert ranks(run) == [(0, 1, 2, 3), (0, 2, 3, 4)]
    (reason,) = [event.reason for event in run.of(PlanProposed) if not event.optional]
    assert reason == "rank 1 was lost: rank 4 takes its place, with layers from its peers"
    assert run.summary.iteration_s[17:] == pytest.approx(undisturbed.summary.iteration_s[17:24], rel=0.02)
