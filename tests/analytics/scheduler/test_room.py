"""The memory of a rank bounds the live search: no candidate gives it more than it has room for, layer by layer."""

from __future__ import annotations

import pytest

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.planners.adaptis.searched import searched_plan
from unskew.analytics.scheduler.changes import held_bytes
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.state import SchedulerState

COST = profile("steady")
ORIGIN = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
SIZES = (1_000,) * 16


def state(room_bytes: float | None, layer_bytes: tuple[int, ...] = SIZES, origin: Plan = ORIGIN) -> SchedulerState:
    works = tuple(Work(tokens, tokens * tokens // 2) for tokens in range(100, 116))
    return SchedulerState(
        origin=origin, alive=frozenset(origin.ranks), speeds={2: dict.fromkeys("FBW", 1 / 1.8)}, cost=COST,
        batches=(works,) * 10, iterations=1000, layer_bytes=layer_bytes, bytes_per_us=1000.0, regroup_us=200_000.0,
        room_bytes=room_bytes,
    )  # fmt: skip


def most_held(plan: Plan, layer_bytes: tuple[int, ...] = SIZES) -> float:
    return max(held_bytes(plan, layer_bytes).values())


def test_no_rank_is_given_more_layers_than_it_has_room_for() -> None:
    free, reason = propose(0, ORIGIN, state(None))
    assert free is not None, reason
    assert most_held(free.plan) == 5_000
    tight, reason = propose(0, ORIGIN, state(4_500.0))
    assert tight is not None, reason
    assert tight.plan.role_of[2].n_layers == 4, "nobody else has room for a layer of it"
    assert max(max(layers) for one in tight.considered for layers in one.layers) == 4
    assert tight.predicted_us > free.predicted_us


def test_room_for_the_whole_model_is_no_limit() -> None:
    free, _ = propose(0, ORIGIN, state(None))
    roomy, _ = propose(0, ORIGIN, state(16_000.0))
    assert free is not None
    assert roomy == free


def test_a_heavy_layer_counts_as_what_it_takes() -> None:
    """Who has an embedding as large as two layers besides has room for four layers, where the others have it for six."""
    heavy = (3_000, *SIZES[1:])
    proposal, reason = propose(0, ORIGIN, state(6_000.0, heavy))
    assert proposal is not None, reason
    assert most_held(proposal.plan, heavy) == 6_000
    assert len(proposal.plan.role_of[0].layers) == 4
    assert all(layers[0] <= 4 for one in proposal.considered for layers in one.layers if len(layers) == 4)
    assert any(max(layers) > 4 for one in proposal.considered for layers in one.layers)


@pytest.mark.parametrize("room_bytes", [4_500.0, None])
def test_what_adaptis_searches_anew_has_to_fit_too(room_bytes: float | None) -> None:
    origin = searched_plan(pp=4, dp=2, n_layers=16, micro_batches=16, cost=COST, tokens=128)
    least = most_held(origin)
    asked = state(room_bytes and max(room_bytes, least), origin=origin)
    proposal, _ = propose(0, origin, asked)
    assert proposal is None or most_held(proposal.plan) <= (asked.room_bytes or 16_000)
    considered = () if proposal is None else proposal.considered
    assert all(max(layers) * 1_000 <= (asked.room_bytes or 16_000) for one in considered for layers in one.layers)
    anew = [one for one in considered if one.name == "searched anew (AdaPtis)"]
    assert bool(anew) == (room_bytes is None)


def test_ranks_without_room_for_the_model_get_no_other_plan() -> None:
    with pytest.raises(PlanError, match="no room for the model"):
        propose(0, ORIGIN, state(1_500.0))
