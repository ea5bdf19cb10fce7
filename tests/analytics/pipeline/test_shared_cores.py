"""Ranks that share fewer cores than they are: exact on graphs whose times are known by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.dag import Dag, dag_of
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.pipeline.schedule import pipeline_of
from unskew.analytics.pipeline.shared_cores import Cores, run_on_cores
from unskew.analytics.predictor.fit import Fit, TimedIteration, fit_terms

WORKS = [Work(100, 10_000)] * 4
COST = CostModel(chunks={kind: ChunkCost(layer_us=us, token_us=0.0, token2_us=0.0) for kind, us in (("F", 1e3), ("B", 2e3))})


def ends(dag: Dag, spent: list[float], cores: int, held: list[float] | None = None) -> list[float]:
    durations = np.array(spent)
    return run_on_cores(dag, durations, (), Cores(cores, durations if held is None else np.array(held)))[1].tolist()


@pytest.mark.parametrize(
    ("spent", "held", "cores", "expected"),
    [
        ([1, 1, 1], None, 2, [1.5, 1.5, 1.5]),
        ([1, 1, 2], None, 2, [1.5, 1.5, 2.5]),  # alone from 1.5 on, with half of its work left
        ([1, 2, 4], None, 1, [3, 5, 7]),
        ([4, 1, 1], [1, 1, 1], 1, [6, 3, 3]),  # three time units for the work of each, then the first one only waits
        ([4, 4, 1], [0, 0, 1], 1, [4, 4, 1]),  # who holds no core takes none from others
    ],
)
def test_ranks_at_work_go_on_at_the_same_rate(
    spent: list[float], held: list[float] | None, cores: int, expected: list[float]
) -> None:
    assert ends(dag_of([[] for _ in spent]), spent, cores, held) == pytest.approx(expected)


def test_a_core_is_free_again_for_what_waited_for_an_input() -> None:
    """Two chains of two on one core, the second of one chain 2 late: 0 and 1 are done at 2; 3 works alone from 2 to 4, when 2
    comes and both share: each has 2 left of 2 and 1 of 3."""
    dag = Dag(np.array([[-1, -1, 0, 1]]))
    lags = np.array([0.0, 0.0, 2.0, 0.0])
    durations = np.array([1.0, 1.0, 2.0, 3.0])
    start, end = run_on_cores(dag, durations, (lags,), Cores(1, durations))
    assert start.tolist() == pytest.approx([0, 0, 4, 2])
    assert end.tolist() == pytest.approx([2, 2, 7, 6])


def test_with_a_core_for_each_it_is_the_other_evaluator() -> None:
    pipeline = pipeline_of("1f1b", ranks=4, micro_batches=6)
    durations = np.random.default_rng(5).uniform(1, 3, (len(pipeline), 3))
    dag, spent, lags = pipeline.timed(durations, 0.25)
    for mine, theirs in zip(run_on_cores(dag, spent, lags, Cores(4, durations)), dag.run(spent, lags), strict=True):
        assert mine == pytest.approx(theirs)


def test_an_iteration_on_shared_cores() -> None:
    """Four replicas of a rank with 6 ms of work on two cores take twice as long. One half as fast works alone at the end. If it
    only waits: 2 ms of all until 4; three share two cores until 6; its B of 4 ms beside them until 11 1/3, alone until 12 2/3,
    and 4 ms without a core."""
    plan = plan_from_partition(
        plan_version=0, n_layers=2, schedule="1f1b", members=[[r] for r in range(4)], layers=[[2]] * 4, micro_batches=[1] * 4
    )
    slow = {0: {"F": 0.5, "B": 0.5}}
    shared = msgspec.structs.replace(COST, cores=2)
    assert predict_iteration(plan, WORKS, COST).iteration_us == pytest.approx(6_000)
    assert predict_iteration(plan, WORKS, shared).iteration_us == pytest.approx(12_000)
    assert predict_iteration(plan, WORKS, shared, slow).iteration_us == pytest.approx(18_000)
    waits = msgspec.structs.replace(shared, idle={0: 0.5})
    assert predict_iteration(plan, WORKS, waits, slow).iteration_us == pytest.approx(50_000 / 3)


def test_a_circle_has_no_times() -> None:
    with pytest.raises(ValueError, match="circle"):
        ends(Dag(np.array([[1, 0]])), [1.0, 1.0], 1)


def test_ranks_that_share_cores_take_turns_at_the_end_of_an_iteration() -> None:
    """Learned of two replicas of two stages on two cores, 20 ms, of which a sum of gradients is 4. Without one of the four
    ranks its replica's layers are all on one, whose two sums follow each other as they did before for want of cores; what else
    ranks do takes three quarters. A single pipeline sums nothing. With a core for each, sums that follow each other take more.
    """
    four = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=4)
    three = plan_from_partition(
        plan_version=1, n_layers=8, schedule="1f1b", members=[[0, 1], [2]], layers=[[4, 4], [8]], micro_batches=[2, 2]
    )
    two = uniform_plan(tp=1, pp=2, dp=1, n_layers=8, micro_batches=4)
    cost = msgspec.structs.replace(COST, cores=2, end_ranks=4, iteration_end_us=20_000.0, collective_us=4_000.0)
    assert [cost.end_us(plan) for plan in (four, three, two)] == [20_000.0, 16_000.0, 8_000.0]
    assert cost.least_end_us == 8_000.0
    # What iterations of a plan took longer is longer by as much in the next ones of it.
    for plan in (four, three, two):
        longer = msgspec.structs.replace(cost, iteration_end_us=cost.iteration_end_us + 1_200.0 / cost.crowding(plan))
        assert longer.end_us(plan) == pytest.approx(cost.end_us(plan) + 1_200.0)
    alone = msgspec.structs.replace(cost, cores=None)
    assert [alone.end_us(plan) for plan in (four, three)] == [20_000.0, 24_000.0]


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_an_end_that_was_learned_on_shared_cores_is_that_of_its_own_plan(pp: int, dp: int) -> None:
    """Of one pipeline, too, which sums nothing, while what a sum takes is known from a plan before it."""
    plan = uniform_plan(tp=1, pp=pp, dp=dp, n_layers=8, micro_batches=4)
    cost = msgspec.structs.replace(COST, cores=2, end_ranks=len(plan.ranks))
    seen = TimedIteration(plan, tuple(WORKS), predict_iteration(plan, WORKS, cost).iteration_us + 20_000.0, {})
    fitted = Fit(model=cost, error_percent={}, n_chunks=0, unidentified={}, left_out={})
    learned = fit_terms(
        fitted, [seen] * 6, lambda one, cost: predict_iteration(one.plan, one.works, cost).iteration_us, collectives_us=[4e3]
    )
    assert predict_iteration(plan, WORKS, learned.model).iteration_us == pytest.approx(seen.us)
    assert learned.error_percent["iteration"] == pytest.approx(0.0, abs=1e-9)
