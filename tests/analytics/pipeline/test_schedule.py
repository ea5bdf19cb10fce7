"""Schedules and timelines of arbitrary legal plans: exact oracles for uniform ones, invariants for all."""

import json
from collections import defaultdict, deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.planning.legal_plans import legal_plans

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import Hop, Plan, PlanError, Role, Route
from unskew.analytics.pipeline.schedule import build_schedule, evaluate


def units(schedule, slow_rank=None):
    """Durations: F:B = 1:2 per layer, twice that on `slow_rank`."""
    us = [a.n_layers * (1 if a.kind == "F" else 2) * (2 if a.rank == slow_rank else 1) for a in schedule.order]
    return np.array(us, float)


def replay(schedule):
    """Execute the ranks' lists as the runtime does: messages without tags, taken in the order in which they were sent.

    Returns the executed (kind, micro-batch, layer); fails when a rank takes a message meant for another action, or on deadlock.
    """
    routes = schedule.plan.routes
    waiting = {rank: deque(actions) for rank, actions in schedule.by_rank.items()}
    wires, done, executed = defaultdict(deque), set(), []
    progress = True
    while progress:
        progress = False
        for rank, actions in waiting.items():
            while actions:
                action = actions[0]
                hops = routes[action.micro_batch].hops
                ahead = action.hop + (-1 if action.kind == "F" else 1)
                key = (action.kind, action.micro_batch, action.hop)
                if 0 <= ahead < len(hops):
                    sender = hops[ahead].rank
                    if sender == rank:
                        if (action.kind, action.micro_batch, ahead) not in done:
                            break
                    elif not wires[sender, rank]:
                        break
                    else:
                        assert wires[sender, rank].popleft() == key
                if action.kind == "B":
                    assert ("F", action.micro_batch, action.hop) in done
                actions.popleft()
                progress = True
                done.add(key)
                executed += [(action.kind, action.micro_batch, action.first_layer + i) for i in range(action.n_layers)]
                behind = action.hop + (1 if action.kind == "F" else -1)
                if 0 <= behind < len(hops) and hops[behind].rank != rank:
                    wires[rank, hops[behind].rank].append((action.kind, action.micro_batch, behind))
    assert not any(waiting.values()), "deadlock"
    assert not any(wires.values()), "a message nobody takes"
    return executed


def crossing_plan():
    """Ranks 0 and 1 hold everything and send both ways: here the cap and the order of messages block each other."""
    orders = [[(1, 1), (5, 0)], [(4, 1), (2, 0)], [(1, 0), (3, 1), (2, 0)]]
    routes = []
    for micro_batch, stage_order in enumerate(orders):
        firsts = [sum(count for count, _ in stage_order[:leg]) for leg in range(len(stage_order))]
        hops = tuple(Hop(first_layer=f, n_layers=n, ranks=(rank,)) for f, (n, rank) in zip(firsts, stage_order, strict=True))
        routes.append(Route(micro_batch=micro_batch, replica=0, hops=hops))
    roles = tuple(Role(rank=rank, replica=0, stage=0, first_layer=0, n_layers=6) for rank in range(2))
    return Plan(plan_version=0, n_layers=6, schedule="1f1b", roles=roles, routes=tuple(routes))


@settings(deadline=None, max_examples=150)
@given(plan=legal_plans())
@example(plan=crossing_plan())
def test_every_layer_of_every_micro_batch_runs_once_and_messages_come_in_order(plan):
    executed = replay(build_schedule(plan))
    wanted = {(k, m, layer) for k in "FB" for m in range(len(plan.routes)) for layer in range(plan.n_layers)}
    assert len(executed) == len(wanted)
    assert set(executed) == wanted


@settings(deadline=None, max_examples=80)
@given(plan=legal_plans(), message=st.integers(0, 5), data=st.data())
def test_a_timeline_respects_data_ranks_and_bounds(plan, message, data):
    schedule = build_schedule(plan)
    cost = {action: data.draw(st.integers(1, 9)) for action in schedule.order}
    timeline = evaluate(schedule, np.array([cost[action] for action in schedule.order], float), message)
    span = {a: (s, e) for a, s, e in zip(schedule.order, timeline.start_us, timeline.end_us, strict=True)}
    for actions in schedule.by_rank.values():
        assert all(span[first][1] <= span[then][0] for first, then in pairwise(actions))
    at = {(a.kind, a.micro_batch, a.hop): a for a in schedule.order}
    for route in plan.routes:
        stage_order = [at["F", route.micro_batch, h] for h in range(len(route.hops))]
        stage_order += [at["B", route.micro_batch, h] for h in reversed(range(len(route.hops)))]
        for first, then in pairwise(stage_order):
            assert span[then][0] >= span[first][1] + (message if first.rank != then.rank else 0)
    assert timeline.makespan_us >= max(timeline.busy_us.values())
    assert sum(timeline.busy_us.values()) == sum(cost.values())


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (4, 2), (4, 8), (8, 8), (8, 32)])
def test_a_uniform_plan_is_canonical_1f1b_with_its_known_makespan(stages, micro_batches):
    plan = uniform_plan(tp=1, pp=stages, dp=1, n_layers=stages, micro_batches=micro_batches)
    schedule = build_schedule(plan)
    for stage, actions in schedule.by_rank.items():
        warm_up = min(stages - stage, micro_batches)
        wanted = [("F", m) for m in range(warm_up)]
        for m in range(micro_batches):
            wanted += [("B", m)] + [("F", m + warm_up)] * (m + warm_up < micro_batches)
        assert [(action.kind, action.micro_batch) for action in actions] == wanted
    assert evaluate(schedule, units(schedule)).makespan_us == (micro_batches + stages - 1) * 3


def test_two_stages_with_one_at_half_speed_lose_what_is_known():
    """Throughput against healthy: 0.60; 0.741 with 11/21 layers; a healthy replica forced to 11/21 keeps 0.842."""

    def makespan(layers, slow):
        plan = plan_from_partition(
            plan_version=0, n_layers=32, schedule="1f1b", members=[[0, 1]], layers=[layers], micro_batches=[4]
        )
        schedule = build_schedule(plan)
        return float(evaluate(schedule, units(schedule, slow_rank=0 if slow else None)).makespan_us)

    healthy = makespan([16, 16], False)
    assert healthy / makespan([16, 16], True) == pytest.approx(0.60, abs=0.001)
    assert healthy / makespan([11, 21], True) == pytest.approx(0.741, abs=0.001)
    assert healthy / makespan([11, 21], False) == pytest.approx(0.842, abs=0.001)


def test_a_message_costs_only_between_ranks():
    plan = plan_from_partition(
        plan_version=0, n_layers=2, schedule="1f1b", members=[[0, 1]], layers=[[1, 1]], micro_batches=[1]
    )
    schedule = build_schedule(plan)
    assert evaluate(schedule, units(schedule), 10.0).makespan_us == 6 + 2 * 10


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("schedule",), "1f2b", "schedule 1f2b is not known, allowed: gpipe, 1f1b"),
        (("roles", 1, "rank"), 0, "a rank has two roles"),
        (("roles", 1, "n_layers"), 9, "rank 1 holds layers 2..10 of 4"),
        (("roles", 0, "more"), [[2, 1]], "rank 0 holds layers 2..2 of 4"),
        (("routes", 0, "micro_batch"), 1, "route 0 is for micro-batch 1"),
        (("routes", 0, "hops", 1, "first_layer"), 3, "has layer 3 where 2 is due"),
        (("routes", 0, "hops", 1, "n_layers"), 1, "ends at layer 3 of 4"),
        (("routes", 0, "hops", 1, "ranks"), [0], "rank 0 does not hold the layers it executes for micro-batch 0"),
        (("routes", 0, "hops", 1, "ranks"), [], "nobody executes layer 2 of micro-batch 0"),
        (("n_layers",), None, "not a plan"),
    ],
)
def test_an_illegal_plan_is_refused_in_a_sentence(path, value, sentence):
    data = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=2).to_data()
    Plan.from_data(data)
    place = json.loads(json.dumps(data))
    *stage_order, last = path
    inner = place
    for step in stage_order:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(PlanError, match=sentence):
        Plan.from_data(place)
