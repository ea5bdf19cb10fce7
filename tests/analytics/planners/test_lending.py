"""Layers lent to other ranks: the order is `dispatch`'s, the work evener, nothing is lost with the next death."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import validate
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.analytics.planners.adaptis.dispatch import DispatchOptions, PipelineTask, dispatch
from unskew.analytics.planners.adaptis.lending import DESCENDING, MORE_KEPT, lent
from unskew.analytics.planners.adaptis.paths import PathsTask, most_kept, ordered, paths_of
from unskew.analytics.planners.adaptis.searched import searched_plan
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import CHUNK_KINDS

SPEEDS = {rank: 0.5 if rank == 1 else 1.0 for rank in range(8)}
TASK = PathsTask(
    until_us={kind: {rank: [n / speed for n in range(17)] for rank, speed in SPEEDS.items()} for kind in CHUNK_KINDS}
)
START = searched_plan(pp=4, dp=2, n_layers=16, micro_batches=8, cost=profile("steady"), tokens=128)


def works_us(task, paths):
    works = Counter()
    for path in paths:
        for leg in path:
            works[leg[0]] += task.works_us(leg)
    return works


@settings(deadline=None, max_examples=60)
@given(data=st.data(), devices=st.integers(1, 3), micro_batches=st.integers(1, 5), message=st.integers(0, 3))
def test_one_pipeline_is_ordered_as_dispatch_orders_it(data, devices, micro_batches, message):
    stages = data.draw(st.integers(devices, 3 * devices))
    device = tuple(stage % devices for stage in range(stages))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(stages)]
    ends = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    layer_us = {kind: data.draw(st.integers(1, 5)) for kind in CHUNK_KINDS}
    speeds = [data.draw(st.sampled_from([1.0, 0.5])) for _ in range(devices)]
    task = PathsTask(
        until_us={
            kind: {d: [n * us / speed for n in range(ends[-1] + 1)] for d, speed in enumerate(speeds)}
            for kind, us in layer_us.items()
        },
        message_us=message,
    )
    costs = [[n * layer_us[kind] / speeds[d] for n, d in zip(sizes, device, strict=True)] for kind in CHUNK_KINDS]
    pipe = PipelineTask(*costs, kept=sizes, device=device, n_devices=devices, micro_batches=micro_batches, message_us=message)
    turn, patience = data.draw(st.sampled_from(["latest", "groups", "lowest"])), data.draw(st.sampled_from([0.0, 0.5]))
    limit, forward_first = float(data.draw(st.integers(ends[-1], 2 * ends[-1]))), data.draw(st.booleans())
    knobs = DispatchOptions(limit, turn=turn, patience=patience, forward_first=forward_first)
    path = tuple(zip(device, ends, sizes, strict=False))
    paths = (path,) * micro_batches
    found, known = ordered(task, paths, knobs, works_us(task, paths)), dispatch(pipe, knobs)
    assert found.makespan_us == pytest.approx(known.makespan_us)
    assert [found.lists[d] for d in range(devices)] == [*map(list, known.lists)]


def test_lending_evens_out_what_whole_layers_and_micro_batches_cannot():
    """128 layers of micro-batches on 7.5 ranks are 17.07 for each, with whole ones 17 or 18, of three each; a pipeline of 3.5
    ranks has 5 of 16 layers on its busiest, which are 20 of them."""
    best = lent(TASK, paths_of(START), MORE_KEPT * most_kept(START), 60_000, lambda one: one.makespan_us)
    assert best is not None
    before_us = ordered(TASK, paths_of(START), DispatchOptions(1e9), works_us(TASK, paths_of(START))).makespan_us
    assert 3 * 18 <= best.makespan_us < 3 * 20 < 3 * 32 <= before_us
    plan = best.plan(START, 1)
    schedule = build_schedule(plan)
    spent = np.array(
        [TASK.leg_us(action.kind, (action.rank, action.first_layer, action.n_layers)) for action in schedule.order]
    )
    assert float(evaluate(schedule, spent).makespan_us) == pytest.approx(best.makespan_us)
    assert most_kept(plan) <= MORE_KEPT * most_kept(START)
    assert set(plan.ranks) == set(START.ranks)
    for rank in plan.ranks:
        validate(recover(plan, {rank}, 2))  # no layer goes with it


def test_a_plan_too_large_for_the_search_is_left_as_it_is():
    """Six orders of the start, which are the first descent's, are more than the actions that descents may schedule."""
    paths, limit = paths_of(START), MORE_KEPT * most_kept(START)
    orders = 6 * 3 * sum(map(len, paths))
    asked = list[float]()

    def price_us(one):
        asked.append(one.makespan_us)
        return one.makespan_us

    for actions in (0, orders, int(orders / DESCENDING)):
        assert lent(TASK, paths, limit, actions, price_us) is None
    assert asked == []
    assert lent(TASK, paths, limit, int((orders + 10) / DESCENDING), price_us) is not None


def test_an_order_is_given_up_as_soon_as_it_cannot_end_in_time():
    paths, knobs = paths_of(START), DispatchOptions(1e9)
    works = works_us(TASK, paths)
    whole = ordered(TASK, paths, knobs, works)
    assert ordered(TASK, paths, knobs, works, whole.makespan_us) == whole
    early = ordered(TASK, paths, knobs, works, whole.makespan_us - 1)
    assert early.makespan_us == np.inf
    assert early.actions < whole.actions == 3 * sum(map(len, paths))


def test_paths_keep_replicas_stages_and_what_layers_weigh():
    weights = tuple(1.0 + layer for layer in range(4))
    start = plan_from_partition(
        plan_version=0, n_layers=4, schedule="zb-h1", members=[[0, 1], [2, 3]], layers=[[2, 2], [1, 3]], micro_batches=[1, 1]
    )
    start = msgspec.structs.replace(start, layer_weights=weights)
    found = ordered(TASK, paths_of(start), DispatchOptions(1e9), works_us(TASK, paths_of(start)))
    plan = found.plan(start, 5)
    assert (plan.plan_version, plan.schedule, plan.layer_weights) == (5, "searched", weights)
    assert (plan.roles, plan.routes) == (start.roles, start.routes)
