"""Layers move with their optimiser state: who sends what to whom, and that it arrives to the last bit."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training.threads_rendezvous import ThreadsRendezvous

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import Plan, Role
from unskew.analytics.shards.parts import Part
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm
from unskew.runtime.rank.commit import CommitStanding, HeldCopy, RankState, decoded
from unskew.runtime.rank.migrate import LayersLost, execute_moves, plan_moves
from unskew.runtime.size import ModelSize

N_LAYERS = 6
_SPLITS = st.lists(st.integers(1, N_LAYERS - 1), max_size=2, unique=True).map(
    lambda cuts: [b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), N_LAYERS], strict=True)]
)
_PARTITIONS = st.lists(_SPLITS, min_size=1, max_size=3)


def partition(splits: list[list[int]], plan_version: int) -> Plan:
    """Replica after replica, ranks in order."""
    ranks = iter(range(100))
    return plan_from_partition(
        plan_version=plan_version,
        n_layers=N_LAYERS,
        schedule="1f1b",
        members=[[next(ranks) for _ in split] for split in splits],
        layers=splits,
        micro_batches=[1] * len(splits),
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    old=st.lists(_SPLITS, min_size=1, max_size=3),
    new=st.lists(_SPLITS, min_size=1, max_size=3),
    dead=st.sets(st.integers(0, 8)),
)
def test_moves_bring_every_rank_what_it_lacks_from_one_who_has_it(
    old: list[list[int]], new: list[list[int]], dead: set[int]
) -> None:
    before, after = partition(old, 0), partition(new, 1)
    holds = {role.rank: set(range(role.first_layer, role.end_layer)) for role in before.roles if role.rank not in dead}
    current = {rank: {layer: [None] for layer in sorted(holds.get(rank, ()))} for rank in {*holds, *after.ranks}}
    try:
        moves = plan_moves(after, current)
    except LayersLost as lost:
        layer = int(str(lost).split()[1])
        assert not any(layer in layers for layers in holds.values())
        return
    for move in moves:
        assert move.piece.layer in current[move.source]
        assert move.piece.layer not in current[move.target]
    for role in after.roles:
        taken = [move.piece.layer for move in moves if move.target == role.rank]
        assert len(taken) == len(set(taken))
        assert set(range(role.first_layer, role.end_layer)) <= set(current[role.rank]) | set(taken)


def test_of_what_a_rank_says_only_current_copies_count() -> None:
    """And of these, for the gradients, only the one of the part that its role goes on with."""
    half, stale = Part(0, 1, 2), HeldCopy(None, 4, {0: 1})
    copies = {0: (HeldCopy(half, 5, {1: 2}), HeldCopy(None, 5, {})), 1: (stale,), 2: (stale, HeldCopy(None, 5, {3: 2}))}
    state = RankState(standing=CommitStanding(stepped=5, attempt=0, outcome=None), copies=copies)
    heard = decoded({7: msgspec.msgpack.encode(state)})[7]
    assert heard.parts(5) == {0: [half, None], 2: [None]}
    role = Role(rank=7, replica=0, stage=0, first_layer=0, n_layers=4)
    assert heard.sums(role, 5) == {0: {}, 2: {3: 2}}
    assert heard.sums(msgspec.structs.replace(role, part=half), 5) == {0: {1: 2}}


def test_parameters_and_moments_arrive_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks in threads, real messages: rank 2 had nothing, rank 1 gives its first layer up to rank 0."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    size = ModelSize(n_layers=4, dim=16, heads=1)
    plan = plan_from_partition(
        plan_version=1, n_layers=4, schedule="1f1b", members=[[0, 1], [2]], layers=[[3, 1], [4]], micro_batches=[1, 1]
    )
    held = {0: [0, 1], 1: [2, 3], 2: []}
    rendezvous, packed, failed = ThreadsRendezvous(), {}, []

    def layer(number: int, seed: int) -> HeldLayer:
        return HeldLayer(size, number, seed=seed, dtype=torch.float32, device=torch.device("cpu"))

    def trained(number: int) -> HeldLayer:
        fresh = layer(number, seed=3)
        generator = torch.Generator().manual_seed(number)
        for _ in range(5):
            for parameter in fresh.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            fresh.step()
        return fresh

    def live(rank: int) -> None:
        layers = {number: trained(number) for number in held[rank]}
        comm = Comm(rendezvous, 1, rank, plan.ranks, [])
        comm.build()
        copies = {number: [one] for number, one in layers.items()}
        moves = plan_moves(plan, {other: {number: [None] for number in numbers} for other, numbers in held.items()})
        role = plan.role_of[rank]
        for number in range(role.first_layer, role.end_layer):
            layers.setdefault(number, layer(number, seed=99))
        execute_moves(comm, moves, copies, layers, 5)
        for number in range(role.first_layer, role.end_layer):
            steps = {int(count) for count in layers[number].step_counts}
            assert (layers[number].steps, steps) == (5, {5})
            packed[rank, number] = layers[number].pack()

    def guarded(rank: int) -> None:
        try:
            live(rank)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert set(packed) == {(0, 0), (0, 1), (0, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)}
    assert all(torch.equal(state, trained(number).pack()) for (_, number), state in packed.items())
