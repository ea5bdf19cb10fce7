"""Minimal recovery: whoever dies, the peers that hold its layers take over and nothing else moves."""

from collections import Counter
from itertools import combinations

import msgspec
import pytest

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import PlanError, validate
from unskew.analytics.scheduler.changes import describe, moved_layers
from unskew.analytics.scheduler.recovery import recover
from unskew.analytics.shards.parts import parts_by

UNIFORM = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
UNEVEN = plan_from_partition(
    plan_version=3,
    n_layers=16,
    schedule="1f1b",
    members=[[0, 1, 2, 3], [4, 5, 6], [8, 9, 10, 11]],
    layers=[[4, 4, 4, 4], [6, 5, 5], [5, 2, 5, 4]],
    micro_batches=[6, 4, 6],
)


@pytest.mark.parametrize("plan", [UNIFORM, UNEVEN], ids=["uniform", "uneven"])
def test_every_single_death_and_every_pair_is_survived_or_named(plan):
    for dead in [*combinations(plan.ranks, 1), *combinations(plan.ranks, 2)]:
        lost = [layer for layer in range(plan.n_layers) if set(plan.holders(layer)) <= set(dead)]
        if lost:
            with pytest.raises(PlanError, match=rf"no living rank holds layers {', '.join(map(str, lost))} after the loss"):
                recover(plan, set(dead), 9)
            continue
        recovered = recover(plan, set(dead), 9)
        validate(recovered)
        assert recovered.plan_version == 9
        assert recovered.roles == tuple(role for role in plan.roles if role.rank not in dead)
        assert moved_layers(plan, recovered) == ()
        for before, after in zip(plan.routes, recovered.routes, strict=True):
            executor = {layer: h.rank for h in after.hops for layer in range(h.first_layer, h.first_layer + h.n_layers)}
            kept = [h for h in before.hops if h.rank not in dead]
            assert all(executor[layer] == h.rank for h in kept for layer in range(h.first_layer, h.first_layer + h.n_layers))


def test_one_after_the_other_is_survived_too():
    first = recover(UNEVEN, {9}, 4)
    then = recover(first, {1}, 5)
    assert 1 not in then.ranks
    assert {hop.rank for route in then.routes for hop in route.hops} <= set(then.ranks)


def test_the_load_is_spread_over_the_peers():
    plan = uniform_plan(tp=1, pp=4, dp=4, n_layers=16, micro_batches=24)
    recovered = recover(plan, {5}, 1)
    executed = Counter(hop.rank for route in recovered.routes for hop in route.hops)
    assert [executed[rank] for rank in (1, 9, 13)] == [8, 8, 8]
    assert describe(plan, recovered) == "rank 5: leaves; " + "; ".join(
        f"rank {rank}: 0 -> 2 rerouted micro-batches" for rank in (1, 9, 13)
    )


def test_a_hop_is_split_where_the_holders_ranges_differ():
    recovered = recover(
        recover(UNEVEN, {8, 9, 10, 11}, 4), {1}, 5
    )  # rank 1's layers 4..7 lie on rank 4 (0..5) and rank 5 (6..10)
    assert [(h.rank, h.first_layer, h.n_layers) for h in recovered.routes[0].hops][:3] == [(0, 0, 4), (4, 4, 2), (5, 6, 2)]


def test_what_is_left_of_groups_that_were_cut_otherwise_is_a_group():
    """5/3 and 1/1 of a layer lose the second and the first member: 5/8 and the second half are there, an eighth twice."""
    parts = [*parts_by([5, 3]), *parts_by([1, 1])]
    plan = uniform_plan(tp=2, pp=1, dp=2, n_layers=3, micro_batches=4)
    plan = msgspec.structs.replace(
        plan, roles=tuple(msgspec.structs.replace(role, part=parts[role.rank]) for role in plan.roles)
    )
    first = recover(plan, {1}, 1)
    assert first.role_of[0].part == parts[0]
    second = recover(first, {2}, 2)
    assert {hop.ranks for route in second.routes for hop in route.hops} == {(0, 3)}
    assert [str(role.part) for role in second.roles] == ["0 to 5/8", "5/8 to 1"]
    assert moved_layers(first, second) == ()
    with pytest.raises(PlanError, match="no living rank holds layers 0, 1, 2 after the loss of rank 0, rank 2"):
        recover(plan, {0, 2}, 1)
