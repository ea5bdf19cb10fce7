"""Exact gradients for any plan: each layer is summed over all ranks that hold it, also after a death within the iteration.

Micro-batch losses are divided by the iteration's target tokens before the backward pass, so a sum is all that is needed,
whatever replica executed which micro-batch; the losses themselves travel with the last layer. Groups are taken in the plan's
order (first layer ascending), the same on every rank, and bucket by bucket. A bucket is reduced in a copy: until that is whole
the layers have what this rank added itself, so a death in the middle costs nobody what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.kept import KeptGradients, keep, nothing_kept
from unskew.collector.events import Span
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm
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
    for number, (ranks, bucket) in enumerate(due):
        if number + 1 == len(due):
            before_last()
        flat = torch.cat([layers[layer].pack_sum(everything) for layer in bucket])
        start_us = device.now_us()
        with progress.waiting("collective"):
            comm.all_reduce(flat, ranks)
        spans.append(
            label(
                kind="all_reduce", start_us=start_us, wall_us=device.now_us() - start_us, first_layer=bucket[0],
                n_layers=len(bucket), group="-".join(map(str, ranks)), bytes=flat.nbytes,
            )
        )  # fmt: skip
        offset = 0
        for layer in bucket:
            size = layers[layer].sum_size(everything)
            summed = {one: kept.of[layer].get(one, plan.plan_version) for one in range(everything)}
            layers[layer].unpack_sum(flat[offset : offset + size], summed)
            offset += size
    return spans


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
    _take_over(kept, layers, comm)
    return kept


def _take_over(kept: KeptGradients, layers: Mapping[int, HeldLayer], comm: Comm) -> None:
    everything = kept.n_micro_batches
    sent = [
        comm.send(layers[one.layer].pack_sum(everything), one.target, one.layer)
        for one in kept.transfers
        if one.source == comm.rank
    ]
    for one in kept.transfers:
        if one.target == comm.rank:
            layer = layers[one.layer]
            place = torch.empty(layer.sum_size(everything), dtype=layer.parameters[0].dtype)
            layer.unpack_sum(comm.receive(place, one.source, one.layer).wait(), dict(kept.of[one.layer]))
    for pending in sent:
        pending.wait()


def _buckets(
    plan: Plan, layers: Mapping[int, HeldLayer], kept: KeptGradients, rank: int
) -> Iterator[tuple[tuple[int, ...], Sequence[int]]]:
    """(ranks, layers) of each bucket that is still to be reduced on this rank, the same in every member of a group."""
    for ranks, group in plan.gradient_groups:
        bucket: list[int] = []
        size = 0
        for layer in group if rank in ranks else ():
            if layer in kept.reduced:
                continue
            bucket.append(layer)
            size += layers[layer].packed_size // 3 * layers[layer].parameters[0].element_size()
            if size >= BUCKET_BYTES:
                yield ranks, bucket
                bucket, size = [], 0
        if bucket:
            yield ranks, bucket
