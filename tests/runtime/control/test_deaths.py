"""Ranks die, hang and freeze in real processes: training goes on in the survivors, with the losses of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, assert_exact, train

from unskew.collector.events import DeviceLost, IterationCommitted, PlanApplied, Regrouped, RunFinished, Suspected, Verdict

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(SMALL)


@pytest.mark.parametrize(
    ("rank", "point"), [(0, "compute"), (3, "compute"), (1, "before_barrier"), (2, "before_barrier"), (3, "before_step")]
)
def test_a_kill_costs_no_iteration_and_no_digit(rank: int, point: str, tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, f"kill:rank={rank},at=5,point={point}")
    assert_exact(run, undisturbed, {0, 1, 2, 3} - {rank})
    (lost,) = run.of(DeviceLost)
    assert (lost.rank, lost.how, lost.detail) == (rank, "exit", "signal SIGKILL")
    (verdict,) = run.of(Verdict)
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("dead", [rank])
    assert [plan.reason for plan in run.of(PlanApplied)][1:] == [f"rank {rank} was lost (exit)"]
    assert run.of(Regrouped)[-1].seconds < 5
    # Between the barrier and the step everybody held the gradients: the iteration counts as it was, else it is redone.
    first_attempt = {event.attempt for event in run.of(IterationCommitted) if event.iteration == 5} == {0}
    assert first_attempt == (point == "before_step")


@pytest.mark.parametrize("at", [(5, 5), (5, 6), (0, 8)], ids=str)
def test_two_ranks_die_nearly_at_once(at: tuple[int, int], tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, f"kill:rank=0,at={at[0]}", f"kill:rank=3,at={at[1]},point=before_step")
    assert_exact(run, undisturbed, {1, 2})
    lost = {(event.rank, event.how, event.detail) for event in run.of(DeviceLost)}
    assert lost == {(rank, "exit", "signal SIGKILL") for rank in (0, 3)}


def test_without_a_holder_the_run_fails_and_names_the_layers(tmp_path: Path) -> None:
    run = train(tmp_path, "kill:rank=1,at=4", "kill:rank=3,at=6")
    finished = run.of(RunFinished)[-1]
    assert finished.status == "failed"
    assert "no living rank holds layers 2, 3 after the loss of" in finished.reason
    assert finished.iterations >= 5


@pytest.mark.parametrize("kind", ["hang", "freeze"])
def test_hung_and_frozen_are_told_apart_and_survived(kind: str, tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, f"{kind}:rank=2,at=5")
    (lost,) = run.of(DeviceLost)
    slow_to_end = run.same_process & {2} if lost.cut_off else set()  # when the others went on it may have ended, or not yet
    assert_exact(run, undisturbed, {0, 1, 3} | slow_to_end)
    assert (lost.rank, lost.how) == (2, {"hang": "hung", "freeze": "frozen"}[kind])
    (verdict,) = run.of(Verdict)
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("hung", [2])
    assert {party.rank for party in verdict.victims} <= {0, 1, 3}


def test_a_rank_that_is_stopped_for_a_moment_and_cannot_be_spared_is_waited_for(tmp_path: Path) -> None:
    run = train(tmp_path, "freeze:rank=1,at=5,seconds=0.7", dp=1)
    assert_exact(run, undisturbed_losses(run.options), {0, 1})
    assert [suspected.rank for suspected in run.of(Suspected)] == [1]
    assert run.of(DeviceLost) == []


def test_mode_observe_stops_at_a_death_and_names_the_cause(tmp_path: Path) -> None:
    run = train(tmp_path, "kill:rank=2,at=5", mode="observe")
    finished = run.of(RunFinished)[-1]
    assert finished.status == "failed"
    assert finished.reason == "rank 2 was lost (signal SIGKILL) and mode observe changes nothing: the run stops"
    assert [verdict.cause for verdict in run.of(Verdict)] == ["dead"]
    assert len(run.of(PlanApplied)) == 1
