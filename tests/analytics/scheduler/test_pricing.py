"""What is computed once for many candidates is what it is for each alone, and the same plans come out of it as before."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.cost import ChunkCost, CostModel, PlaceCost, SlowLink
from unskew.analytics.core.layout import Layout, Pipeline, to_plan, uniform_plan
from unskew.analytics.core.plan import Plan, PlanError, validate
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import layer_costs, model_for, predict_iterations
from unskew.analytics.planners.problem import PlannerCluster, PlannerJob
from unskew.analytics.planners.resihp import progressive
from unskew.analytics.scheduler.changes import alike, moved_layers
from unskew.analytics.scheduler.cost_benefit import Pricing
from unskew.analytics.scheduler.recovery import recover


def some_plan(random: np.random.Generator, schedule: str) -> Plan:
    """Uneven pipelines of uneven groups."""
    n_layers, rank = 12, 0
    pipelines = []
    for replica in range(int(random.integers(1, 4))):
        stages = int(random.integers(1, 5))
        cuts = np.sort(random.choice(np.arange(1, n_layers), stages - 1, replace=False))
        layers = tuple(np.diff([0, *cuts, n_layers]).tolist())
        groups, shares = [], []
        for _ in range(stages):
            size = int(random.integers(1, 4))
            groups.append(tuple(range(rank, rank + size)))
            shares.append(tuple(random.integers(1, 4, size).tolist()))
            rank += size
        count = int(random.integers(1, 7))
        pipelines.append(Pipeline(replica, tuple(groups), layers, count, shares=tuple(shares)))
    plan = to_plan(Layout(tuple(pipelines), schedule=schedule), n_layers)
    again = {member for ranks in plan.team_of.values() if random.random() < 0.3 for member in ranks}
    return plan.recomputing(again - {rank for rank in again if not again.issuperset(plan.team_of[rank])})


def some_cost(random: np.random.Generator, plan: Plan) -> CostModel:
    chunks = {
        kind: ChunkCost(layer_us=float(us), token_us=0.5, token2_us=0.0, head_us_per_token=1.0, own_us=40.0)
        for kind, us in zip("FB", random.uniform(100, 300, 2), strict=True)
    }
    others = tuple(
        PlaceCost(device_class="", tp=k, chunks={kind: one.times(1.2 / k) for kind, one in chunks.items()}) for k in (2, 3)
    )
    links = [SlowLink(one, other, 400.0) for one, other in random.integers(0, len(plan.ranks), (3, 2)).tolist() if one != other]
    return CostModel(
        chunks=chunks,
        others=others,
        message_us=float(random.choice([0.0, 30.0])),
        message_token_us=float(random.choice([0.0, 0.2])),
        iteration_end_us=50.0,
        sum_us=float(random.choice([0.0, 5.0])),
        slow_links=tuple(links) if random.random() < 0.5 else (),
        blocking=bool(random.random() < 0.3),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_price_is_what_the_evaluator_says_of_the_whole_plan(seed: int) -> None:
    """Alike micro-batches or not, pipelines of their own or replicas that do each other's work, in groups, over slow links."""
    random = np.random.default_rng(seed)
    plan = some_plan(random, str(random.choice(["1f1b", "zb-h1"])))
    if seed % 2:
        with_dead = {int(random.choice(plan.ranks))}
        try:
            plan = recover(plan, with_dead, 1)
        except PlanError:
            pytest.skip("nobody else holds its layers")
    cost = model_for(some_cost(random, plan), plan.schedule)
    speeds = {int(rank): dict.fromkeys("FBW", 0.5) for rank in random.choice(plan.ranks, 2)}
    tokens = [64] * len(plan.routes) if seed % 3 else random.integers(16, 256, len(plan.routes)).tolist()
    batches = [[Work(count, count**2) for count in tokens]] * 2
    priced = Pricing(layer_costs(batches, cost), speeds)
    expected = predict_iterations(plan, batches, cost, speeds)
    assert priced.of(plan).iteration_us == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_no_partition_ends_before_its_bound(seed: int) -> None:
    """ResiHP's levels do not play partitions whose bound is above a plan that they have."""
    random = np.random.default_rng(seed)
    job = PlannerJob(
        n_layers=16, micro_batches=12, head_layers=float(random.choice([0.0, 0.7])), own_layers=0.4 * (seed % 2),
        schedule=str(random.choice(["1f1b", "zb-h1"])), message_us=float(random.choice([0.0, 0.1])),
    )  # fmt: skip
    speeds = random.choice([1.0, 1.0, 0.5, 0.7, 0.0], (3, 4, 2))
    cluster = PlannerCluster(job=job, speeds=speeds)
    played = []
    bound_us = progressive._least_us

    def seen(*asked: object) -> float:
        played.append(bound_us(*asked))  # type: ignore[arg-type]
        return 0.0  # so that every partition is played

    try:
        found = progressive.plan_progressive(cluster)
    except PlanError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progressive, "_least_us", seen)
        everything = progressive.plan_progressive(cluster)
    assert found.layout == everything.layout
    assert min(played) <= everything.predicted_us * (1 + 1e-9)


def test_changes_are_told_role_by_role() -> None:
    """Equal changes are found once: they count for each rank that makes them."""
    first = uniform_plan(tp=2, pp=2, dp=2, n_layers=8, micro_batches=4)
    layout = Layout(tuple(Pipeline(d, tuple((4 * d + 2 * s, 4 * d + 2 * s + 1) for s in (0, 1)), (3, 5), 2) for d in (0, 1)))
    after = to_plan(layout, 8)
    assert moved_layers(first, after) == ((3, 0.5),) * 4
    assert not alike(first, after)
    assert alike(first, first.renumbered(9))
    assert alike(after, to_plan(layout, 8, plan_version=3))


def test_a_pipeline_that_is_made_once_is_checked_in_every_plan() -> None:
    one = Pipeline(0, ((0,), (1,)), (2, 2), 2)
    validate(to_plan(Layout((one,)), 4))
    with pytest.raises(PlanError, match="two roles"):
        to_plan(Layout((one, msgspec.structs.replace(one, replica=1))), 4)
    with pytest.raises(PlanError, match="ends at layer 4 of 5"):
        to_plan(Layout((one,)), 5)
