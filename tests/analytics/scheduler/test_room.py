"""The memory of a rank bounds the live search: no candidate gives it more than it has room for, layer by layer."""

from __future__ import annotations

import msgspec
import pytest

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.memory import LayerMemory, Room, peak_bytes
from unskew.analytics.planners.adaptis.searched import searched_plan
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.state import SchedulerState

COST = profile("steady")
ORIGIN = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
SIZES = (1_000,) * 16


def state(room_bytes: float | None, layer_bytes: tuple[int, ...] = SIZES, origin: Plan = ORIGIN) -> SchedulerState:
    memory = LayerMemory.of_layers(layer_bytes)
    return asked_with(None if room_bytes is None else Room(memory=memory, tokens=0, rank_bytes=room_bytes), layer_bytes, origin)


def asked_with(room: Room | None, layer_bytes: tuple[int, ...] = SIZES, origin: Plan = ORIGIN) -> SchedulerState:
    works = tuple(Work(tokens, tokens * tokens // 2) for tokens in range(100, 116))
    return SchedulerState(
        origin=origin, alive=frozenset(origin.ranks), speeds={2: dict.fromkeys("FBW", 1 / 1.8)}, cost=COST,
        batches=(works,) * 10, iterations=1000, layer_bytes=layer_bytes, bytes_per_us=1000.0, regroup_us=200_000.0,
        room=room,
    )  # fmt: skip


def most_held(plan: Plan, layer_bytes: tuple[int, ...] = SIZES) -> float:
    return max(peak_bytes(plan, LayerMemory.of_layers(layer_bytes), 0).values())


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


def test_layers_are_shared_out_by_what_each_of_them_takes() -> None:
    """Who has the heavy layer has room for no other; half of the mean layers would be four for each."""
    sizes = (7_000, *(1_000,) * 7)
    origin = plan_from_partition(
        plan_version=0, n_layers=8, schedule="1f1b", members=[[0, 1], [3, 2]], layers=[[1, 7]] * 2, micro_batches=[8, 8]
    )
    proposal, reason = propose(0, origin, state(7_500.0, sizes, origin))
    assert proposal is not None, reason
    assert {layers for one in proposal.considered for layers in one.layers} == {(1, 7)}
    assert most_held(proposal.plan, sizes) == 7_000


def test_activations_of_micro_batches_in_flight_take_room_too() -> None:
    """The first stage has four micro-batches in flight, the last one: where a layer's activations are as large as the layer,
    who helps the slow rank out is one of the later stages."""
    memory = LayerMemory(gradient_bytes=(100,) * 16, token_bytes=(4.0,) * 16, cut_token_bytes=(0.0,) * 16, bucket_bytes=10**6)
    free, reason = propose(0, ORIGIN, asked_with(None))
    assert free is not None, reason
    needs = peak_bytes(ORIGIN, memory, 100)
    room = Room(memory=memory, tokens=100, rank_bytes=max(needs.values()))
    assert "rank 0 would need" in room.lack(free.plan)
    with pytest.raises(PlanError, match=r"plan \d+ does not fit: rank 0"):
        room.fitted(free.plan)
    proposal, reason = propose(0, ORIGIN, asked_with(room))
    assert proposal is not None, reason
    assert room.lack(proposal.plan) == ""
    assert len(proposal.plan.role_of[2].layers) < 4 <= len(proposal.plan.role_of[3].layers)
    assert max(one.layers[0][0] for one in proposal.considered) == 4


def test_ranks_recompute_in_plans_that_have_no_room_otherwise() -> None:
    """Where layers are given a tenth of what they keep, plans have room that had none, and are priced with a forward more."""
    memory = LayerMemory(
        gradient_bytes=(100,) * 16, token_bytes=(4.0,) * 16, cut_token_bytes=(0.0,) * 16, bucket_bytes=10**6,
        given_bytes=(0.4,) * 16,
    )  # fmt: skip
    room = Room(memory=memory, tokens=100, rank_bytes=0.9 * max(peak_bytes(ORIGIN, memory, 100).values()))
    current = room.fitted(ORIGIN)
    assert {role.rank for role in current.roles if role.recompute} == {0, 4}
    proposal, reason = propose(0, current, asked_with(room, origin=current))
    assert proposal is not None, reason
    assert room.lack(proposal.plan) == ""
    whole = peak_bytes(proposal.plan.recomputing(()), memory, 100)
    short = {rank for rank, need in whole.items() if need > room.rank_bytes}
    assert {role.rank for role in proposal.plan.roles if role.recompute} == short
    free, _ = propose(0, ORIGIN, asked_with(None))
    assert free is not None
    assert free.baseline_us < proposal.baseline_us, "a B that recomputes takes an F longer"
    assert len({one.recompute for one in proposal.considered}) > 1
    assert {"joint planner", "laid out anew"} <= {one.name for one in proposal.considered}


def test_groups_divide_their_tokens_before_they_recompute() -> None:
    """Each step where the one before does not suffice, of the first stage, which has most micro-batches in flight."""
    plan = uniform_plan(tp=2, pp=2, dp=1, n_layers=4, micro_batches=4)
    memory = LayerMemory(
        gradient_bytes=(100,) * 4, token_bytes=(6.0,) * 4, cut_token_bytes=(4.0,) * 4, bucket_bytes=100,
        given_bytes=(1.0,) * 4, by_tokens=True,
    )  # fmt: skip
    modes = [((), ()), ((), (0, 1)), ((0, 1), (0, 1))]
    needs = [peak_bytes(plan.recomputing(*mode), memory, 100)[0] for mode in modes]
    assert needs == sorted(set(needs), reverse=True)
    for need, (again, by_tokens) in zip(needs, modes, strict=True):
        fitted = Room(memory=memory, tokens=100, rank_bytes=need).fitted(plan)
        assert {role.rank for role in fitted.roles if role.sequence_parallel and role.stage == 0} == set(by_tokens)
        assert {role.rank for role in fitted.roles if role.recompute and role.stage == 0} == set(again)
    undivided = Room(memory=msgspec.structs.replace(memory, by_tokens=False), tokens=100, rank_bytes=needs[1])
    assert undivided.fitted(plan) == plan.recomputing((0, 1))


def test_a_plan_that_ranks_cannot_go_over_to_is_no_candidate() -> None:
    """They could hold it, but not the old copies beside the new ones until it has committed."""
    memory = LayerMemory(gradient_bytes=(1_000,) * 16, token_bytes=(1.0,) * 16, cut_token_bytes=(0.0,) * 16, bucket_bytes=10**6)
    free, reason = propose(0, ORIGIN, asked_with(None))
    assert free is not None, reason
    holding, going = (max(peak_bytes(free.plan, memory, 1, before).values()) for before in (None, ORIGIN))
    assert going > holding
    tight, roomy = (Room(memory=memory, tokens=1, rank_bytes=most) for most in (going - 1, going))
    assert tight.lack(free.plan) == "" != tight.lack(free.plan, ORIGIN)
    assert roomy.lack(free.plan, ORIGIN) == ""
    found = [propose(0, ORIGIN, asked_with(room))[0] for room in (tight, roomy)]
    assert [one is not None and one.plan.digest == free.plan.digest for one in found] == [False, True]


@pytest.mark.parametrize("room_bytes", [4_500.0, None])
def test_what_adaptis_searches_anew_has_to_fit_too(room_bytes: float | None) -> None:
    origin = searched_plan(pp=4, dp=2, n_layers=16, micro_batches=16, cost=COST, tokens=128)
    least = most_held(origin)
    asked = state(room_bytes and max(room_bytes, least), origin=origin)
    proposal, _ = propose(0, origin, asked)
    room_for = 16_000 if asked.room is None else asked.room.rank_bytes
    assert proposal is None or most_held(proposal.plan) <= room_for
    considered = () if proposal is None else proposal.considered
    assert all(max(layers) * 1_000 <= room_for for one in considered for layers in one.layers)
    anew = [one for one in considered if one.name == "searched anew (AdaPtis)"]
    assert anew, "without a limit it finds what some rank has no room for"


def test_ranks_without_room_for_the_model_get_no_other_plan() -> None:
    with pytest.raises(PlanError, match="no room for the model"):
        propose(0, ORIGIN, state(1_500.0))
