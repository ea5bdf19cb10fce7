"""Layers, and pieces of them, move with their optimiser state, straight from rank to rank.

A copy of a layer is current when it has been stepped as often as iterations are committed. Every rank says which copies it
holds when it comes to meet the others, so the moves follow from what is really there, also when a move was cut short by a
death: a layer is kept by its old holder until the first iteration under the new plan is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.handover import MOST_MOVING
from unskew.analytics.shards.parts import Part, Piece, common, ends_of, pieces_of
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm, Pending


class LayersLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """No survivor holds a current copy of some layer: only a checkpoint could bring it back."""


class PieceTransfer(msgspec.Struct, frozen=True):
    """`target` takes a piece of a layer from `source`."""

    piece: Piece
    source: int
    target: int


Copies = Mapping[int, Sequence[HeldLayer]]
"""Layer -> what a rank has of it: after a change of its part that no commit has sealed, also what it had before."""
Holdings = Mapping[int, Mapping[int, Sequence[Part | None]]]
"""Rank -> layer -> the parts of which it has current copies; None = all of the layer."""


def plan_moves(plan: Plan, current: Holdings) -> tuple[PieceTransfer, ...]:
    """Which copies must travel so that every rank holds its part of its role's layers.

    Each piece that a rank lacks comes from the current holder that sends least so far (the lowest rank among equals). Where
    layers are cut, pieces end wherever a part ends, so only what is missing moves.
    Raises `LayersLost`.
    """
    sends = dict.fromkeys(current, 0)
    moves = []
    for role in sorted(plan.roles, key=lambda role: role.rank):
        for layer in role.layers:
            parts = {rank: held[layer] for rank, held in current.items() if held.get(layer)}
            for piece in _missing(layer, role.part, parts, role.rank):
                holders = [rank for rank, of in parts.items() if any(_has(part, piece) for part in of)]
                if not holders:
                    raise LayersLost(f"layer {layer} is lost: no surviving rank holds a current copy")
                source = min(holders, key=lambda rank: (sends[rank], rank))
                sends[source] += 1
                moves.append(PieceTransfer(piece, source, role.rank))
    return tuple(moves)


def _missing(layer: int, wanted: Part | None, parts: Mapping[int, Sequence[Part | None]], rank: int) -> list[Piece]:
    """The pieces that the rank wants and has in none of its copies."""
    own = parts.get(rank, ())
    if wanted in own:
        return []
    ends = dict(enumerate([wanted, *(part for of in parts.values() for part in of)]))
    pieces = [piece for piece, _ in pieces_of(layer, ends)]
    return [piece for piece in pieces if _has(wanted, piece) and not any(_has(part, piece) for part in own)]


def _has(part: Part | None, piece: Piece) -> bool:
    low, high = ends_of(part)
    return piece.low == piece.high or (low <= piece.low and piece.high <= high)


def copies_of(layers: Mapping[int, HeldLayer], before: Mapping[int, Sequence[HeldLayer]]) -> dict[int, list[HeldLayer]]:
    """All that a rank has: `before`, what it had of layers of which it has another part now."""
    return {number: [layer, *before.get(number, ())] for number, layer in layers.items()}


def execute_moves(
    comm: Comm, moves: Sequence[PieceTransfer], copies: Copies, layers: Mapping[int, HeldLayer], committed: int
) -> int:
    """Send from the `copies` that were there, and fill those of `layers` that are new. Returns bytes received.

    A rank has at most `MOST_MOVING` moves begun and takes its own in the order of all: of the first not through both
    sides have begun, so none waits for ever. Where something moves it ends with a barrier: when it returns on one rank, every
    rank holds what the plan asks of it. Raises `PeerLost`.
    """
    new = [number for number, layer in layers.items() if layer.steps != committed]
    for number in new:
        for copy in copies.get(number, ()):
            if copy.steps == committed:
                layers[number].copy_from(copy, common(number, copy.part, layers[number].part))
    received, moving = 0, deque[tuple[Piece | None, Pending]]()

    def end_first() -> int:
        piece, pending = moving.popleft()
        flat = pending.wait()
        if piece is None:
            return 0
        layers[piece.layer].unpack(flat, piece)
        return flat.nbytes

    for tag, move in enumerate(moves):
        if comm.rank not in (move.source, move.target):
            continue
        if len(moving) == MOST_MOVING:
            received += end_first()
        if move.target == comm.rank:
            room = layers[move.piece.layer].room_for(move.piece)
            moving.append((move.piece, comm.receive(room, move.source, tag)))
        else:
            flat = _holder(copies, move.piece, committed).pack(move.piece).to("cpu")
            moving.append((None, comm.send(flat, move.target, tag)))
    while moving:
        received += end_first()
    for number in new:
        layers[number].stepped(committed)
    if moves:
        comm.all_gather(torch.zeros(1))
    return received


def _holder(copies: Copies, piece: Piece, committed: int) -> HeldLayer:
    return next(copy for copy in copies[piece.layer] if copy.steps == committed and _has(copy.part, piece))


def settle_in(
    comm: Comm,
    plan: Plan,
    layers: dict[int, HeldLayer],
    before: dict[int, list[HeldLayer]],
    make: Callable[[int, Part | None], HeldLayer],
    *,
    current: Holdings | None,
    committed: int,
) -> int:
    """Bring into `layers` what the plan asks this rank to hold; the bytes that came. `current`: what is there; None where the
    run begins and each makes its own. `before`: what it had of layers of which it has another part now. Raises `PeerLost`; then
    nothing changed."""
    copies = copies_of(layers, before)
    mine = {}
    for role in [plan.role_of[comm.rank]] if comm.rank in plan.role_of else []:
        for number in role.layers:
            there = (copy for copy in copies.get(number, ()) if copy.steps == committed and copy.part == role.part)
            mine[number] = next(there, None) or make(number, role.part)
    if current is None:
        comm.all_gather(torch.zeros(1))  # what others take to make theirs is no time of the first iteration
    received = execute_moves(comm, () if current is None else plan_moves(plan, current), copies, mine, committed)
    before.clear()
    before.update(
        {number: [copy for copy in of if copy is not mine.get(number)] for number, of in copies.items() if number in mine}
    )
    layers.update(mine)
    return received
