"""A rank so slow that the plan is faster without it goes on standby, is measured there, and comes back; no digit of the loss
changes."""

from __future__ import annotations

import os
import signal
import threading
from functools import reduce
from pathlib import Path
from statistics import median

import pytest
from support.training.runtime_runs import LONG_CHUNKS, Run, light, train

from unskew.analytics.core.outcome import outcome_of_run
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.failslow import follow_run, settled
from unskew.analytics.replay.replay import replay
from unskew.collector.events import (
    DeviceJoined,
    DeviceLost,
    IterationCommitted,
    PlanApplied,
    PlanIssued,
    PlanScored,
    Regrouped,
    RunFinished,
    Span,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
)
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(240), pytest.mark.slow]
SLOW = "slow:rank=1,factor=6,at=9"
LIGHT = light(LONG_CHUNKS)
LAYOUT = {"profile": "long", "iterations": 60}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("undisturbed"), base=LIGHT, **LAYOUT)


def assert_exact(run: Run, undisturbed: Run) -> None:
    """The run is the undisturbed one, each chunk that counts executed once, and its log lacks nothing."""
    assert run.of(RunFinished)[-1].status == "done", run.of(RunFinished)[-1].reason
    assert len(run.losses) == run.options.iterations
    assert run.losses == pytest.approx(undisturbed.losses[: len(run.losses)], rel=0, abs=1e-8)
    assert run.sql("select * from executed($run) where times != 1") == []
    commits = [(event.iteration, event.rank) for event in run.of(IterationCommitted)]
    assert len(commits) == len(set(commits))


def plans(run: Run) -> list[tuple[int, tuple[int, ...]]]:
    """(from iteration, ranks with a role) of each plan that came into force."""
    return [(event.iteration, Plan.from_data(event.plan).ranks) for event in run.of(PlanApplied)]


def iteration_s(run: Run, first: int, end: int) -> float:
    return median(run.summary.iteration_s[first:end])


def test_a_rank_that_was_slow_when_the_run_began_stays_away_while_it_is(tmp_path: Path) -> None:
    """By its own product, taken when it was slow already, it was healthy on standby: it came and went to the end of the run."""
    run = train(tmp_path, "slow:rank=1,factor=6,at=0", base=LIGHT, **LAYOUT)
    assert [ranks for _, ranks in plans(run)] == [(0, 1, 2, 3), (0, 2, 3)]
    assert run.of(VerdictClosed) == []
    readings = [product.slowdown for product in run.of(StandbyMeasured)]
    assert len(readings) >= 5
    assert readings == pytest.approx([6.0] * len(readings), rel=0.01)


def test_a_stage_whose_device_was_slow_when_the_run_began_is_no_dear_stage(tmp_path: Path) -> None:
    """Alone in its role, it was taken for a dear stage. A second product tells; where none may be measured nobody knows."""
    fault = "slow:rank=1,factor=3,at=0"
    run = train(tmp_path / "auto", fault, base=LIGHT, pp=2, dp=1, mode="auto", profile="long", iterations=40)
    (verdict,) = run.of(Verdict)
    assert (verdict.culprits[0].rank, verdict.since_iteration) == (1, 0)
    assert verdict.speed == {kind: pytest.approx(1 / 3, abs=0.001) for kind in "FB"}
    assert run.of(VerdictClosed) == []
    (scored,) = run.of(PlanScored)
    assert scored.measured_s == pytest.approx(scored.predicted_s, rel=0.01)
    watched = train(tmp_path / "observe", fault, base=LIGHT, pp=2, dp=1, mode="observe", profile="long", iterations=32)
    for one, causes in ((run, ["slow_device"]), (watched, [])):
        with open_store(one.store) as reader:
            log = load_run(reader, one.id)
        diagnosis, live = diagnose(log), outcome_of_run(reduce(fold, log.control, RunState()), controlled=False)
        assert [verdict.cause for verdict in diagnosis.verdicts if verdict.cause != "long_sequences"] == causes
    for found in (diagnosis, live):
        assert found.outcome == "cannot_be_judged"
        assert found.why.startswith("stage 1 is dear or rank 1 is slow since iteration 0: one product was long")


def test_a_slow_rank_stands_by_and_comes_back_when_it_is_healthy(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, f"{SLOW},until=32", base=LIGHT, **LAYOUT)
    assert_exact(run, undisturbed)
    assert run.same_process == {0, 1, 2, 3}
    (_, whole), (left, without), (back, again) = plans(run)
    assert (whole, without, again) == ((0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3))
    assert all(event.moved_bytes > 0 for event in run.of(Regrouped)[1:])
    # Four devices' work on three, against waiting for the slow one; and nothing is left of it once it is back.
    assert iteration_s(run, left, back) < 4 / 3 * 1.1 * iteration_s(undisturbed, left, back)
    assert iteration_s(run, 10, left) > 3 * iteration_s(undisturbed, 10, left)
    assert iteration_s(run, back, 60) == pytest.approx(iteration_s(undisturbed, back, 60), rel=0.02)
    measured = {event.iteration: event.slowdown for event in run.of(StandbyMeasured)}
    assert all(rank == 1 for rank in {event.rank for event in run.of(StandbyMeasured)})
    assert measured == {at: pytest.approx(6 if at < 32 else 1, rel=0.01) for at in measured}
    assert {event.until_iteration for event in run.of(VerdictClosed)} == {35}
    assert not any(span.rank == 1 and left <= span.iteration < back for span in run.of(Span) if span.kind in {"F", "B"})
    assert {event.rank for event in run.of(IterationCommitted) if left <= event.iteration < back} == {0, 2, 3}
    with open_store(run.store) as reader:
        decided = replay(recorded_run(reader, run.id))
        diagnosed = follow_run(load_run(reader, run.id)).findings.verdicts
    assert decided.differences == ()
    assert decided.compared > len(run.losses)
    assert diagnosed == settled(event for event in run.events if isinstance(event, Verdict | VerdictClosed))


def test_the_only_holder_of_layers_hands_them_over_before_it_stands_by(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, SLOW, base=LIGHT, pp=3, dp=1, **{**LAYOUT, "iterations": 40})
    assert_exact(run, undisturbed)
    assert [ranks for _, ranks in plans(run)] == [(0, 1, 2), (0, 2)]
    assert run.of(Regrouped)[1].moved_bytes > 0


# A hang takes a second to be named, so that run needs iterations that take their time.
@pytest.mark.parametrize(("fault", "how", "device"), [("kill", "exit", "virtual"), ("hang", "hung", "sleep")])
def test_nothing_is_redone_when_a_rank_is_lost_on_standby(
    fault: str, how: str, device: str, tmp_path: Path, undisturbed: Run
) -> None:
    run = train(tmp_path, SLOW, f"{fault}:rank=1,at=20", base=LIGHT, device=device, **{**LAYOUT, "iterations": 32})
    assert_exact(run, undisturbed)
    (lost,) = run.of(DeviceLost)
    assert (lost.rank, lost.how, lost.victims) == (1, how, ())
    assert [ranks for _, ranks in plans(run)] == [(0, 1, 2, 3), (0, 2, 3)]
    assert len(run.of(PlanIssued)) == 2
    assert {event.attempt for event in run.of(IterationCommitted)} == {0}


def test_a_rank_on_standby_is_the_spare_of_one_that_dies(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, f"{SLOW},until=31", "kill:rank=2,at=30", base=LIGHT, **LAYOUT)
    assert_exact(run, undisturbed)
    _, (_, without), (died, two), *_, (back, last) = plans(run)
    assert (died, without, two, last) == (30, (0, 2, 3), (0, 3), (0, 1, 3))
    assert iteration_s(run, back, 60) < 0.9 * iteration_s(run, died + 1, back)


def test_a_spare_copy_that_executes_nothing_gets_work_again_when_it_is_healthy(tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, "slow:rank=1,factor=30,at=9,until=32", base=LIGHT, pp=1, **LAYOUT)
    assert_exact(run, undisturbed)
    assert [Plan.from_data(event.plan).executors for event in run.of(PlanApplied)] == [{0, 1}, {0}, {0, 1}]
    assert {round(event.slowdown or 0) for event in run.of(StandbyMeasured)} == {30, 1}


class Killer:
    """SIGKILLs a rank some time after the first optional plan was sent to the ranks: around its hand-over."""

    def __init__(self, rank: int, after_s: float) -> None:
        self.rank, self.after_s, self.timer = rank, after_s, None

    def __call__(self, run: Run, entry: Entry) -> None:
        if self.timer is None and isinstance(entry.event, PlanIssued) and entry.event.optional:
            pid = next(event.pid for event in run.of(DeviceJoined) if event.rank == self.rank)
            self.timer = threading.Timer(self.after_s, os.kill, (pid, signal.SIGKILL))
            self.timer.start()


@pytest.mark.parametrize(("rank", "after_s"), [(1, 0.0), (1, 0.08), (0, 0.05), (2, 0.1)])
def test_a_death_around_the_hand_over_costs_no_digit(rank: int, after_s: float, tmp_path: Path, undisturbed: Run) -> None:
    run = train(tmp_path, SLOW, base=LIGHT, on_event=Killer(rank, after_s), **{**LAYOUT, "iterations": 32})
    assert_exact(run, undisturbed)
    lost = [(event.rank, event.how, event.detail) for event in run.of(DeviceLost)]
    assert lost == [(rank, "exit", "signal SIGKILL")]
