"""Whatever dies whenever: each micro-batch is in each layer's gradient once, and what is kept is not computed for it again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning.legal_plans import legal_plans

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.pipeline.actions import input_of
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.scheduler.kept import KeptGradients, keep, nothing_kept, spread
from unskew.analytics.scheduler.recovery import recover

Sums = dict[int, dict[int, Counter[int]]]
"""Rank -> layer -> micro-batch -> how often its gradient was added: what the tensors would be."""


def execute(plan: Plan, kept: KeptGradients, sums: Sums, versions: dict, stop_after: int) -> bool:
    """Each rank executes its due actions in its order as their inputs come, `stop_after` of them in all; whether all were
    due."""
    plan = spread(plan, kept)
    waiting = {rank: [one for one in actions if kept.executes(one)] for rank, actions in build_schedule(plan).by_rank.items()}
    done: set = set()
    for _ in range(stop_after):
        hops = {number: len(route.hops) for number, route in enumerate(plan.routes)}
        able = [rank for rank, due in waiting.items() if due and input_of(due[0], hops[due[0].micro_batch]) in {None, *done}]
        if not able:
            break
        action = waiting[able[0]].pop(0)
        done.add(action.key)
        for layer in range(action.first_layer, action.first_layer + action.n_layers):
            if action.kind == "B" and kept.counts(layer, action.micro_batch):
                sums[action.rank][layer][action.micro_batch] += 1
                versions[action.rank][layer][action.micro_batch] = plan.plan_version
    return not any(waiting.values())


def reduce_layer(plan: Plan, layer: int, sums: Sums, versions: dict, on: list[int]) -> None:
    """The sum over all holders comes to be on those of `on`; a death may spare only some the whole of it."""
    total = sum((sums[rank][layer] for rank in plan.holders(layer)), Counter())
    origin = {number: version for rank in plan.holders(layer) for number, version in versions[rank][layer].items()}
    for rank in on:
        sums[rank][layer], versions[rank][layer] = Counter(total), dict(origin)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(plan=legal_plans(), data=st.data())
def test_every_micro_batch_is_in_every_sum_once(plan: Plan, data: st.DataObject) -> None:
    everything = dict.fromkeys(range(len(plan.routes)), 1)
    sums: Sums = {rank: {layer: Counter() for layer in plan.role_of[rank].layers} for rank in plan.ranks}
    versions: dict = {rank: {layer: {} for layer in plan.role_of[rank].layers} for rank in plan.ranks}
    kept = nothing_kept(plan)
    for _ in range(data.draw(st.integers(0, 3), label="deaths")):
        ended = execute(plan, kept, sums, versions, data.draw(st.integers(0, 60), label="actions"))
        for layer in range(plan.n_layers) if ended else ():
            if layer not in kept.reduced and data.draw(st.booleans(), label="reduced"):
                on = data.draw(st.lists(st.sampled_from(plan.holders(layer)), unique=True), label="whole on")
                reduce_layer(plan, layer, sums, versions, on)
        try:
            plan = recover(plan, {data.draw(st.sampled_from(plan.ranks), label="dies")}, plan.plan_version + 1)
        except PlanError:
            return
        kept = keep(plan, versions)
        for one in kept.transfers:
            sums[one.target][one.piece.layer] = Counter(sums[one.source][one.piece.layer])
            versions[one.target][one.piece.layer] = dict(kept.of[one.piece.layer])
        stated = {(layer, number) for layer, of in enumerate(kept.of) for number in of}
        logged = [
            (layer, number)
            for one in kept.stretches()
            for layer in range(one.first_layer, one.first_layer + one.n_layers)
            for number in one.micro_batches
        ]
        assert (set(logged), len(logged)) == (stated, len(stated))
        assert kept.share == len(stated) / (plan.n_layers * len(plan.routes))
    assert execute(plan, kept, sums, versions, 10_000), "an action waits for what nobody sends"
    for layer in range(plan.n_layers):
        if layer not in kept.reduced:
            reduce_layer(plan, layer, sums, versions, list(plan.holders(layer)))
        assert all(sums[rank][layer] == everything for rank in plan.holders(layer))


def test_what_a_lost_replica_had_is_spread_over_all_that_are_left() -> None:
    """Of four replicas one loses a rank when all but its own share is reduced: each pipeline executes one of the four."""
    plan = recover(uniform_plan(tp=1, pp=4, dp=4, n_layers=4, micro_batches=16), {6}, 1)
    mine = {route.micro_batch for route in plan.routes if route.replica == 1}
    held = {0: {0: dict.fromkeys(set(range(16)) - mine, 0)}}
    kept = keep(plan, {rank: {rank % 4: held[0][0]} if rank < 4 else {} for rank in plan.ranks})
    attempt = spread(plan, kept)
    busy = Counter(hop.rank for number in mine for hop in attempt.routes[number].hops)
    before = Counter(hop.rank for number in mine for hop in plan.routes[number].hops)
    assert (max(busy.values()), max(before.values())) == (2, 4)
    assert [route for route in attempt.routes if route.micro_batch not in mine] == [
        route for route in plan.routes if route.micro_batch not in mine
    ]
    assert spread(plan, nothing_kept(plan)) is plan
