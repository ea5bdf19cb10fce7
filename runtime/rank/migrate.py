"""Layers move with their optimiser state, straight from rank to rank.

A copy of a layer is current when it has been stepped as often as iterations are committed. Every rank reports which copies it
holds, so the moves follow from what is really there, also when a move was cut short by a death: a layer is kept by its old
holder until the first iteration under the new plan is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from unskew.analytics.core.plan import Plan
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm


class LayersLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """No survivor holds a current copy of some layer: only a checkpoint could bring it back."""


class LayerTransfer(msgspec.Struct, frozen=True):
    """`target` takes `layer` from `source`."""

    layer: int
    source: int
    target: int


def plan_moves(plan: Plan, current: Mapping[int, Sequence[int]]) -> tuple[LayerTransfer, ...]:
    """Which copies must travel so that every rank holds its role's layers; `current[rank]` = layers it has a current copy of.

    Each missing layer comes from the current holder that sends least so far (the lowest rank among equals).
    Raises `LayersLost`.
    """
    sends = dict.fromkeys(current, 0)
    moves = []
    for role in sorted(plan.roles, key=lambda role: role.rank):
        for layer in role.layers:
            if layer in current.get(role.rank, ()):
                continue
            holders = [rank for rank, layers in current.items() if layer in layers]
            if not holders:
                raise LayersLost(f"layer {layer} is lost: no surviving rank holds a current copy")
            source = min(holders, key=lambda rank: (sends[rank], rank))
            sends[source] += 1
            moves.append(LayerTransfer(layer, source, role.rank))
    return tuple(moves)


def exchange_holdings(comm: Comm, n_layers: int, layers: Mapping[int, HeldLayer], committed: int) -> dict[int, list[int]]:
    """rank -> layers of which it holds a current copy. Raises `PeerLost`."""
    row = torch.tensor([layer in layers and layers[layer].steps == committed for layer in range(n_layers)], dtype=torch.int64)
    return {
        rank: [layer for layer in range(n_layers) if held[layer]]
        for rank, held in zip(comm.members, comm.all_gather(row).tolist(), strict=True)
    }


def execute_moves(comm: Comm, moves: Sequence[LayerTransfer], layers: Mapping[int, HeldLayer], committed: int) -> int:
    """Send and take what concerns this rank; `layers` must already have a place for what comes. Returns bytes received.

    Ends with a barrier: when it returns on one rank, every rank holds what the plan asks of it. Raises `PeerLost`.
    """
    dtype = next(iter(layers.values())).parameters[0].dtype
    arriving = [
        (move, comm.receive(torch.empty(layers[move.layer].packed_size, dtype=dtype), move.source, move.layer))
        for move in moves
        if move.target == comm.rank
    ]
    leaving = [
        comm.send(layers[move.layer].pack().to("cpu"), move.target, move.layer) for move in moves if move.source == comm.rank
    ]
    received = 0
    for move, pending in arriving:
        flat = pending.wait()
        layers[move.layer].unpack(flat, committed)
        received += flat.nbytes
    for pending in leaving:
        pending.wait()
    comm.all_gather(torch.zeros(1))
    return received
