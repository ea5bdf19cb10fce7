"""Sums of gradients beside the backward pass: which buckets there are, when they are through, what an iteration takes then."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.cluster.timing import fault_free_s
from unskew.analytics.core.cost import ChunkCost, CostModel, GradientSync
from unskew.analytics.core.iteration import BucketStep
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import PASSES, Plan, splits_backward
from unskew.analytics.core.workload import Work
from unskew.analytics.loop.by_policy.view import job_of
from unskew.analytics.pipeline.actions import Action
from unskew.analytics.pipeline.gradient_sync import ActionStep, Bucket, bucket_us, buckets_of, last_steps, through
from unskew.analytics.pipeline.prediction import layer_costs, model_for, predict_iteration, predict_iterations
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.predictor.fit import Fit, TimedIteration, fit_terms
from unskew.analytics.scheduler.cost_benefit import Pricing
from unskew.analytics.shards.parts import parts_by

FORWARD = ChunkCost(layer_us=10.0, token_us=0.0, token2_us=0.0)
COST = CostModel(chunks={"F": FORWARD, "B": msgspec.structs.replace(FORWARD.times(2), head_us_per_token=1.0)})
WORK = Work(5, 25)


def synced(plan: Plan, *, bucket_bytes: int, step_us: float, byte_us: float = 0.0) -> CostModel:
    sync = GradientSync(layer_bytes=(10,) * plan.n_layers, bucket_bytes=bucket_bytes, step_us=step_us, byte_us=byte_us)
    return msgspec.structs.replace(COST, sync=sync)


@pytest.mark.parametrize(
    ("bucket_bytes", "step_us", "after_us"),
    [
        (40, 7.0, 14.0),  # all at the end
        (10, 7.0, 14.0),  # a layer's sum, 14 us, is through before the next layer is: the first layer's is waited for
        (20, 7.0, 14.0),
        (10, 15.0, 60.0),  # 30 us for 20 us of backward: the first begins 60 us before the end, the fourth ends after 120
    ],
)
def test_what_is_waited_for_by_hand(bucket_bytes: int, step_us: float, after_us: float) -> None:
    plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=2)
    cost = synced(plan, bucket_bytes=bucket_bytes, step_us=step_us)
    assert predict_iteration(plan, [WORK] * 2, cost).iteration_us == pytest.approx(4 * 30 + 5 + after_us)


def test_a_bucket_waits_for_the_slowest_of_its_ranks() -> None:
    plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=2)
    cost = synced(plan, bucket_bytes=10, step_us=7.0)
    slow = {1: {"F": 0.5, "B": 0.5}}
    assert predict_iteration(plan, [WORK] * 2, cost, slow).iteration_us == pytest.approx(2 * (4 * 30 + 5) + 14)


@pytest.mark.parametrize("schedule", PASSES)
def test_a_rank_closes_each_layer_once_and_its_parts_are_its_chunks(schedule: str) -> None:
    """What is executed is each action once, a W after its B; and a layer is closed by the last step that adds to it."""
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8, schedule=schedule)
    ending = "W" if splits_backward(schedule) else "B"
    buckets = buckets_of(plan, [10] * 8, 10)
    for rank, actions in build_schedule(plan).by_rank.items():
        found = last_steps(actions, plan, buckets, rank)
        steps = [step for number, action in enumerate(actions) for step in found.get(number, (ActionStep(action),))]
        executed = [(*step.action.key, layer) for step in steps for layer in layers_of(step.action)]
        assert sorted(executed) == sorted((*action.key, layer) for action in actions for layer in layers_of(action))
        for kind, *cell in executed:
            assert kind != "W" or executed.index(("B", *cell)) < executed.index(("W", *cell))
        last = {
            layer: number for number, step in enumerate(steps) for layer in layers_of(step.action) if step.action.kind == ending
        }
        assert {layer: number for number, step in enumerate(steps) for layer in step.closes} == last
        assert set(last) == set(plan.role_of[rank].layers)


def layers_of(action: Action) -> range:
    return range(action.first_layer, action.first_layer + action.n_layers)


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (0, "B6.3 W6.3 B6.2 W6.2 B6.1 W6.1 B6.0 W6.0"),  # nobody waits for its last B
        (1, "W4.7 W6.7 W4.6 W6.6 W4.5 W6.5 W4.4 W6.4"),
    ],
)
def test_the_end_of_a_split_backward_pass_goes_layer_by_layer(rank: int, order: str) -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8, schedule="zb-h1")
    steps = [
        step.action
        for turn in last_steps(build_schedule(plan).by_rank[rank], plan, buckets_of(plan, [10] * 8, 10), rank).values()
        for step in turn
    ]
    assert " ".join(f"{one.kind}{one.micro_batch}.{one.first_layer}" for one in steps) == order


def test_what_a_split_backward_pass_hides_by_hand() -> None:
    """One rank, so B and W of the last micro-batch go layer by layer: 20 us each, beside a sum of 14; the head's 5 us come
    first. In the order of the chunks the four sums would begin in the last 40 us, and 26 of 56 be waited for."""
    plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=2, schedule="zb-h1")
    cost = synced(plan, bucket_bytes=10, step_us=7.0)
    assert predict_iteration(plan, [WORK] * 2, cost).iteration_us == pytest.approx(4 * 30 + 5 + 14)


def test_replicas_that_are_cut_otherwise_make_their_parts_together() -> None:
    """Layers 0 to 1 and 2 to 3 against 0 to 2 and 3: buckets end where either has an end, and members pause alike."""
    plan = plan_from_partition(
        plan_version=0, n_layers=4, schedule="1f1b", members=[[0, 2], [4, 5]], layers=[[2, 2], [3, 1]], micro_batches=[2, 2]
    )
    cut = dict(zip((0, 1), parts_by([3, 1]), strict=True))
    roles = [msgspec.structs.replace(role, part=cut[0]) if role.rank == 0 else role for role in plan.roles]
    roles.append(msgspec.structs.replace(roles[0], rank=1, part=cut[1]))
    routes = [
        msgspec.structs.replace(
            route, hops=tuple(msgspec.structs.replace(hop, ranks=(0, 1)) if hop.ranks == (0,) else hop for hop in route.hops)
        )
        for route in plan.routes
    ]
    plan = msgspec.structs.replace(plan, roles=tuple(roles), routes=tuple(routes))
    buckets = buckets_of(plan, [10] * 4, 10)
    assert {bucket.ranks for bucket in buckets} == {(0, 4), (1, 4), (0, 1, 4), (2, 4), (2, 5)}
    assert sum(bucket.n_bytes for bucket in buckets) == pytest.approx(4 * 10)
    by_rank = build_schedule(plan).by_rank
    assert last_steps(by_rank[0], plan, buckets, 0) == last_steps(by_rank[1], plan, buckets, 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5))
def test_buckets_are_through_as_ranks_that_take_them_in_turn_have_them(seed: int, ranks: int) -> None:
    """Against ranks that come to their buckets one after the other and leave each together."""
    random = np.random.default_rng(seed)
    buckets = [
        Bucket(tuple(sorted(random.choice(ranks, int(random.integers(2, ranks + 1)), replace=False).tolist())), (), 1.0)
        for _ in range(6)
    ]
    ready = [{rank: float(random.uniform(0, 9)) for rank in bucket.ranks} for bucket in buckets]
    price = {bucket: float(random.uniform(0, 3)) for bucket in buckets}
    left = {rank: [number for number, bucket in enumerate(buckets) if rank in bucket.ranks] for rank in range(ranks)}
    clock, ends = dict.fromkeys(range(ranks), 0.0), {}
    while any(left.values()):
        for number, bucket in enumerate(buckets):
            if all(left[rank] and left[rank][0] == number for rank in bucket.ranks):
                begins = max(max(clock[rank], ready[number][rank]) for rank in bucket.ranks)
                for rank in bucket.ranks:
                    left[rank].pop(0)
                    clock[rank] = ends[number] = begins + price[bucket]
    assert [end for _, end in through(buckets, ready, price.__getitem__)] == pytest.approx([ends[n] for n in range(6)])
    arrays = [{rank: np.array([of, 2 * of]) for rank, of in one.items()} for one in ready]
    assert [end[0] for _, end in through(buckets, arrays, price.__getitem__)] == pytest.approx([ends[n] for n in range(6)])


def test_what_a_step_and_a_byte_take_is_learned_and_priced_alike_everywhere() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
    true = synced(plan, bucket_bytes=20, step_us=3.0, byte_us=0.5)
    steps = [BucketStep(3.0 + 0.5 * size, size) for size in (5.0, 10.0, 20.0)]
    batches = [[Work(5 + k, 25)] * 4 for k in range(4)]
    seen = [TimedIteration(plan, tuple(works), predict_iteration(plan, works, true).iteration_us + 11.0) for works in batches]
    known = msgspec.structs.replace(true, sync=GradientSync(layer_bytes=(10,) * 4, bucket_bytes=20))
    unfitted = Fit(model=known, error_percent={}, n_chunks=1, unidentified={}, left_out={})
    found = fit_terms(
        unfitted,
        seen,
        lambda one, cost: predict_iteration(one.plan, one.works, cost).iteration_us,
        collectives_us=[40.0],
        bucket_steps=steps,
    ).model
    assert found.sync == true.sync
    assert found.end_us(plan) == pytest.approx(11.0)
    one_by_one = [predict_iteration(plan, works, found).iteration_us for works in batches]
    assert predict_iterations(plan, batches, found) == pytest.approx(one_by_one)
    costs = layer_costs(batches, model_for(found, plan.schedule))
    assert Pricing(costs, {}).of(plan).iteration_us == pytest.approx(one_by_one)
    bucket = buckets_of(plan, [10] * 4, 20)[0]
    assert bucket_us(true.sync or known.sync, bucket) == pytest.approx(2 * (3.0 + 0.5 * 10))  # type: ignore[arg-type]


def test_the_job_that_policies_see_has_the_sums_that_are_not_hidden() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
    cost, works = synced(plan, bucket_bytes=20, step_us=3.0, byte_us=0.5), [Work(5, 25)] * 4
    predicted = predict_iteration(plan, works, cost)
    assert predicted.synced_us > predicted.timeline.makespan_us
    assert fault_free_s(job_of(plan, (1,) * 4, cost, works)) == pytest.approx(predicted.iteration_us / 1e6)
