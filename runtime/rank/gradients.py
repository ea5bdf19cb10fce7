"""Exact gradients for any plan: each layer is summed over all ranks that hold it, also after a death within the iteration.

Micro-batch losses are divided by the iteration's target tokens before the backward pass, so a sum is all that is needed,
whatever replica executed which micro-batch; the losses themselves travel with the last layer. Groups are taken in the plan's
order (first layer ascending), the same on every rank, and bucket by bucket. A bucket is reduced in a copy: until a layer's are
whole it has what this rank added itself, so a death in the middle costs nobody what it holds.

Where layers are cut (tensor parallelism), each piece is summed over those who hold it, whatever else they hold: replicas may be
cut differently. Of a group's members, which all compute the gradients of what is not cut, the one whose part begins the layer
adds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.kept import KeptGradients, keep, nothing_kept
from unskew.analytics.shards.parts import Piece
from unskew.collector.events import Span
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm, PendingMessage
from unskew.runtime.rank.device import Device
from unskew.runtime.rank.progress import RankProgress

BUCKET_BYTES = 25 * 2**20
"""A bucket has as many layers as are needed for this: what is reduced by the time of a death is kept."""


class Reducer(Protocol):
    """What sums over a group of ranks; `rank` is who asks."""

    rank: int

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> None:
        """Sum a flat tensor in place over the ranks of a gradient group. Raises `PeerLost`."""


def reduce_gradients(
    plan: Plan,
    layers: Mapping[int, HeldLayer],
    kept: KeptGradients,
    comm: Reducer,
    *,
    device: Device,
    progress: RankProgress,
    label: Callable[..., Span],
    before_last: Callable[[], None],
) -> list[Span]:
    """Leave the reduced gradients in the layers; one span per bucket. `before_last` is called before this rank's last one.
    Raises `PeerLost`."""
    everything, spans = len(plan.routes), []
    due = [(ranks, bucket) for ranks, bucket in _buckets(plan, layers, kept, comm.rank) if len(ranks) > 1]
    missing = Counter(piece.layer for _, bucket in due for piece in bucket)
    reduced = defaultdict[int, list[tuple[Piece, Tensor]]](list)
    for number, (ranks, bucket) in enumerate(due):
        if number + 1 == len(due):
            before_last()
        flat = torch.cat([_added_by(layers[piece.layer], piece, everything) for piece in bucket])
        start_us = device.now_us()
        with progress.waiting("collective"):
            comm.all_reduce(flat, ranks)
        spans.append(
            label(
                kind="all_reduce", start_us=start_us, wall_us=device.now_us() - start_us, first_layer=bucket[0].layer,
                n_layers=len({piece.layer for piece in bucket}), group="-".join(map(str, ranks)), bytes=flat.nbytes,
            )
        )  # fmt: skip
        sizes = [layers[piece.layer].sum_size(everything, piece) for piece in bucket]
        for piece, part in zip(bucket, torch.split(flat, sizes), strict=True):
            reduced[piece.layer].append((piece, part))
            if len(reduced[piece.layer]) == missing[piece.layer]:
                summed = {one: kept.of[piece.layer].get(one, plan.plan_version) for one in range(everything)}
                _take(layers[piece.layer], reduced.pop(piece.layer), summed)
    return spans


def _added_by(layer: HeldLayer, piece: Piece, everything: int) -> Tensor:
    """What this rank adds to the sum of a piece."""
    flat = layer.pack_sum(everything, piece)
    return torch.zeros_like(flat) if piece.uncut and layer.part is not None and layer.part.first > 0 else flat


def _take(layer: HeldLayer, whole: Sequence[tuple[Piece, Tensor]], summed: Mapping[int, int]) -> None:
    """The whole sums of all its pieces, at once: between them its gradient would be the sum of nothing that can be named."""
    for piece, flat in whole:
        layer.unpack_sum(flat, summed, piece)


def loss_of(plan: Plan, layers: Mapping[int, HeldLayer], rank: int) -> float:
    """The iteration's loss, from the one rank that answers for it; 0 from all others."""
    last = plan.n_layers - 1
    if plan.holders(last)[0] != rank:
        return 0.0
    losses = layers[last].losses
    return sum(losses[micro_batch] for micro_batch in range(len(plan.routes)))


def keep_gradients(plan: Plan, layers: Mapping[int, HeldLayer], comm: Comm, committed: int, *, wanted: bool) -> KeptGradients:
    """Agree with all ranks of the plan on what counts of the attempt that broke, and take over the whole sums that this rank
    lacks; not `wanted`: nothing counts. Raises `PeerLost`; then what each holds is as it was, or more."""
    everything, role = len(plan.routes), plan.role_of[comm.rank]
    if not wanted:
        for layer in layers.values():
            layer.clear_gradients()
        return nothing_kept(plan)
    mine = torch.full((plan.n_layers, everything), -1, dtype=torch.int32)
    for number, layer in layers.items():
        if layer.steps != committed or not role.holds(number, 1):
            layer.clear_gradients()
        for micro_batch, plan_version in layer.summed.items():
            mine[number, micro_batch] = plan_version
    rows = dict(zip(comm.members, comm.all_gather(mine).tolist(), strict=True))
    held = {
        rank: {
            layer: {one: version for one, version in enumerate(rows[rank][layer]) if version >= 0}
            for layer in plan.role_of[rank].layers
        }
        for rank in plan.ranks
    }
    kept = keep(plan, held)
    for rank, number in kept.dropped:
        if rank == comm.rank:
            layers[number].clear_gradients()
    _take_over(kept, layers, comm)
    return kept


def _take_over(kept: KeptGradients, layers: Mapping[int, HeldLayer], comm: Comm) -> None:
    everything = kept.n_micro_batches
    sent, coming = [], defaultdict[int, list[tuple[Piece, PendingMessage]]](list)
    for tag, one in enumerate(kept.transfers):
        layer = layers.get(one.piece.layer)
        if one.source == comm.rank and layer is not None:
            sent.append(comm.send(layer.pack_sum(everything, one.piece), one.target, tag))
        elif one.target == comm.rank and layer is not None:
            place = torch.empty(layer.sum_size(everything, one.piece), dtype=layer.parameters[0].dtype)
            coming[one.piece.layer].append((one.piece, comm.receive(place, one.source, tag)))
    for number, pending in coming.items():
        whole = [(piece, message.wait()) for piece, message in pending]
        _take(layers[number], whole, kept.of[number])
    for message in sent:
        message.wait()


def _buckets(
    plan: Plan, layers: Mapping[int, HeldLayer], kept: KeptGradients, rank: int
) -> Iterator[tuple[tuple[int, ...], Sequence[Piece]]]:
    """(ranks, pieces) of each bucket that is still to be reduced on this rank, the same in every member of a group."""
    for ranks, group in plan.gradient_groups:
        bucket: list[Piece] = []
        size = 0
        for piece in group if rank in ranks else ():
            if piece.layer in kept.reduced:
                continue
            bucket.append(piece)
            size += layers[piece.layer].packed_size(piece) // 3 * layers[piece.layer].parameters[0].element_size()
            if size >= BUCKET_BYTES:
                yield ranks, bucket
                bucket, size = [], 0
        if bucket:
            yield ranks, bucket
