"""Gradients are summed beside the backward pass, on real ranks: what is waited for, what is predicted, and a death then."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, Run, assert_exact, train

from unskew.benchmarks.runtime.overlap import hidden_of
from unskew.collector.events import IterationJudged, PredictorFitted
from unskew.runtime.options import RunOptions

pytestmark = [pytest.mark.limit(120), pytest.mark.slow]
LINKS = {"link_us": 500, "link_mbps": 40}
OVERLAPPED = msgspec.structs.replace(SMALL, layers=8, dim=32, heads=2, iterations=32, mode="observe", **LINKS)  # type: ignore[arg-type]
"""Four layers a rank; a layer's gradients are 107 kB in float64, 22.4 ms over this link, and its backward pass 3.4 ms."""


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(OVERLAPPED)


@pytest.mark.parametrize(("schedule", "hidden"), [("1f1b", 0.6), ("zb-h1", 0.6), ("interleaved", 0.0)])
def test_iterations_wait_for_little_of_it_and_are_predicted(
    schedule: str, hidden: float, tmp_path: Path, undisturbed: list[float]
) -> None:
    """A layer's sum takes 2.5 ms here, its backward pass 3.4; as W alone less than the sum."""
    run = train(tmp_path, base=OVERLAPPED, schedule=schedule, link_us=200, link_mbps=400)
    assert_exact_alone(run, undisturbed)
    late = [one for one in run.of(IterationJudged) if one.iteration >= 16 and one.predicted_us is not None]
    assert len(late) == 16
    assert max(abs((one.predicted_us or 0) / one.measured_us - 1) for one in late) < 0.01
    sync = run.of(PredictorFitted)[-1].model["sync"]
    assert sync["step_us"] == pytest.approx(200, rel=0.02)
    assert sync["byte_us"] == pytest.approx(8 / 400, rel=0.02)
    spans = run.sql("select * from spans where run = $run and iteration = 20 and kind in ('all_reduce', 'B', 'W')")
    for rank in range(4):
        sums = [one for one in spans if one["rank"] == rank and one["kind"] == "all_reduce"]
        computed_us = max(
            one["start_us"] + one["wall_us"] for one in spans if one["rank"] == rank and one["kind"] != "all_reduce"
        )
        assert len(sums) == 4
        assert min(one["start_us"] for one in sums) < computed_us  # of the replica that is ahead the rest waits for the other
    assert min(hidden_of(run)) > hidden  # type: ignore[arg-type]  # it has what is asked of a FinishedRun


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_death_while_buckets_are_summed_costs_no_accuracy(
    rank: int, schedule: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """The dead rank has begun all its buckets but the last: what the others hold of these counts, and nothing counts twice."""
    base = msgspec.structs.replace(OVERLAPPED, iterations=10, mode="auto")
    run = train(tmp_path, f"kill:rank={rank},at=5,point=in_sync", base=base, schedule=schedule)
    assert_exact(run, undisturbed[:10], {0, 1, 2, 3} - {rank})


def test_groups_that_are_cut_sum_their_pieces_meanwhile(tmp_path: Path) -> None:
    """TP2 x DP2, each piece by those who hold it; predicted within 1 %."""
    cut: RunOptions = msgspec.structs.replace(OVERLAPPED, tp=2, pp=1, dp=2, layers=4)
    run = train(tmp_path, base=cut)
    assert_exact_alone(run, undisturbed_losses(cut))
    late = [one for one in run.of(IterationJudged) if one.iteration >= 16 and one.predicted_us is not None]
    assert max(abs((one.predicted_us or 0) / one.measured_us - 1) for one in late) < 0.01


def assert_exact_alone(run: Run, undisturbed: list[float]) -> None:
    assert run.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    assert run.sql("select * from executed($run) where times != 1") == []
