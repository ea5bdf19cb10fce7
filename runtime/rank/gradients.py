"""Exact gradients for any plan: each layer is summed over all ranks that hold it, also after a death within the iteration.

Micro-batch losses are divided by the iteration's target tokens before the backward pass, so a sum is all that is needed,
whatever replica executed which micro-batch; the losses themselves travel with the last layer. Buckets are taken in one order
on all ranks, the last layers first, while the backward pass goes on below (pipeline/gradient_sync.py). A bucket is reduced in
a copy: until a layer's are whole it has what this rank added itself, so a death in the middle costs nobody what it holds.

Where layers are cut (tensor parallelism), each piece is summed over those who hold it, whatever else they hold: replicas may be
cut differently. Of a group's members, which all compute the gradients of what is not cut, the one whose part begins the layer
adds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.gradient_sync import MOST_IN_FLIGHT, Bucket, through
from unskew.analytics.scheduler.kept import Held, KeptGradients, keep, nothing_kept
from unskew.analytics.shards.parts import Piece
from unskew.collector.events import Span
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm, Pending
from unskew.runtime.rank.device import Device
from unskew.runtime.rank.progress import RankProgress


class Sum(Protocol):
    """A sum that was begun."""

    def wait(self) -> object:
        """Until it is through. Raises `PeerLost`."""

    def done(self) -> bool:
        """Whether it is through."""


class Reducer(Protocol):
    """What sums over a group of ranks; `rank` is who asks."""

    rank: int

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Sum:
        """Begin to sum a flat tensor in place over the ranks of a gradient group. Raises `PeerLost`."""


class _BucketSum(msgspec.Struct):
    """A bucket that is being summed, of so many bytes; since when, and until when (us). `sum` and its `flat` copy are None as
    soon as it is taken over: an iteration has more buckets than it has room for."""

    bucket: Bucket
    sum: Sum | None
    flat: Tensor | None
    n_bytes: int
    start_us: int
    end_us: int = 0


class GradientSums:
    """The sums of one attempt on one rank: a bucket is begun as soon as its layers are closed, and those before it are begun;
    what is summed is taken over in the end, or when the attempt breaks. What could be begun at the end alone is begun by
    `finish`: the log is handed over by then.

    `before`: called before buckets are begun, so that the log has what is in them; `before_last` before this rank's last one.
    `open_layers`: those to which this attempt adds something here.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Mapping[int, HeldLayer],
        kept: KeptGradients,
        comm: Reducer,
        buckets: Sequence[Bucket],
        *,
        device: Device,
        progress: RankProgress,
        label: Callable[..., Span],
        before_last: Callable[[], None],
        before: Callable[[], None] = lambda: None,
        open_layers: Iterable[int] = (),
    ) -> None:
        self._plan, self._layers, self._kept, self._comm = plan, layers, kept, comm
        self._device, self._progress, self._label = device, progress, label
        self._before, self._before_last, self._open = before, before_last, set(open_layers)
        self._buckets, self._since_us = buckets, device.now_us()
        self._due = [bucket for bucket in buckets if comm.rank in bucket.ranks]
        self._missing = Counter(piece.layer for bucket in self._due for piece in bucket.pieces)
        self._begun: list[_BucketSum] = []
        self._closed_us: dict[int, int] = {}
        self._summed = defaultdict[int, list[tuple[Piece, Tensor]]](list)

    def close(self, layers: Iterable[int]) -> None:
        """Nothing more is added to these: begin what can be begun, while others are open. Raises `PeerLost`."""
        self._close(layers)
        if self._open and self._next_is_closed:
            self._before()
            self._begin_closed()

    def _close(self, layers: Iterable[int]) -> None:
        if closed := tuple(layers):  # else nobody need know when the last chunk ended, for which a GPU is waited for
            self._open.difference_update(closed)
            self._closed_us.update(dict.fromkeys(closed, self._device.ended_us()))
        self.keep()

    @property
    def _next_is_closed(self) -> bool:
        """Whether another one can be begun."""
        number, in_flight = len(self._begun), sum(one.sum is not None for one in self._begun)
        return number < len(self._due) and in_flight < MOST_IN_FLIGHT and self._open.isdisjoint(self._due[number].layers)

    def _begin_closed(self) -> None:
        everything = len(self._plan.routes)
        while self._next_is_closed:
            bucket = self._due[len(self._begun)]
            if len(self._begun) + 1 == len(self._due):
                self._before_last()
            flat = torch.cat([_added_by(self._layers[piece.layer], piece, everything) for piece in bucket.pieces])
            start_us = max(self._closed_us.get(layer, self._since_us) for layer in bucket.layers)
            with self._progress.waiting("collective"):
                begun = self._comm.all_reduce(flat, bucket.ranks)
            self._begun.append(_BucketSum(bucket, begun, flat, flat.nbytes, start_us))

    def finish(self) -> None:
        """Leave the summed gradients in the layers. Raises `PeerLost`."""
        self._close(tuple(self._open))
        self._begin_closed()
        for number in range(len(self._due)):
            one = self._begun[number]
            if one.sum is not None:
                with self._progress.waiting("collective"):
                    one.sum.wait()
            self._take(one)
            self._begin_closed()

    def spans(self) -> list[Span]:
        """One per bucket, from when those before it were through: nobody sees when the backend begins with it."""
        through_us = (0, *accumulate((one.end_us for one in self._begun), max))
        starts_us = [min(max(one.start_us, free_us), one.end_us) for one, free_us in zip(self._begun, through_us, strict=False)]
        return [
            self._label(
                kind="all_reduce", start_us=start_us, wall_us=one.end_us - start_us,
                first_layer=one.bucket.layers[0], n_layers=len(one.bucket.layers), group="-".join(map(str, one.bucket.ranks)),
                bytes=one.n_bytes,
            )
            for one, start_us in zip(self._begun, starts_us, strict=True)
        ]  # fmt: skip

    def take_time(self, comm: Comm, price: Callable[[Bucket], float]) -> None:
        """On an emulated device: be through with all buckets when they are, by the predictor's rule. Raises `PeerLost`."""
        mine = torch.zeros(len(self._buckets), dtype=torch.float64)
        own = [number for number, bucket in enumerate(self._buckets) if self._comm.rank in bucket.ranks]
        for number, one in zip(own, self._begun, strict=True):
            mine[number] = one.start_us
        with self._progress.waiting("collective"):
            rows = dict(zip(comm.members, comm.all_gather(mine).tolist(), strict=True))
        ready = [{rank: rows[rank][number] for rank in bucket.ranks} for number, bucket in enumerate(self._buckets)]
        times, free_us = through(self._buckets, ready, price), 0
        for number, one in zip(own, self._begun, strict=True):
            one.start_us, one.end_us = max(one.start_us, free_us), round(times[number][1])
            free_us = one.end_us
        self._device.wait_until(free_us)

    def keep(self) -> None:
        """Take over what is summed by now; also after a break."""
        for one in self._begun:
            if one.sum is not None and one.sum.done():
                self._take(one)

    def _take(self, one: _BucketSum) -> None:
        """The whole sums of a layer at once, when all its pieces are there: between them its gradient would be the sum of
        nothing that can be named."""
        if one.flat is None:
            return
        flat, one.flat, one.sum, one.end_us = one.flat, None, None, self._device.now_us()
        everything, plan_version = len(self._plan.routes), self._plan.plan_version
        sizes = [self._layers[piece.layer].sum_size(everything, piece) for piece in one.bucket.pieces]
        for piece, part in zip(one.bucket.pieces, torch.split(flat, sizes), strict=True):
            self._summed[piece.layer].append((piece, part))
            if len(self._summed[piece.layer]) == self._missing[piece.layer]:
                kept = self._kept.of[piece.layer]
                summed = {micro_batch: kept.get(micro_batch, plan_version) for micro_batch in range(everything)}
                _take(self._layers[piece.layer], self._summed.pop(piece.layer), summed)


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


def keep_gradients(plan: Plan, layers: Mapping[int, HeldLayer], comm: Comm, held: Held | None) -> KeptGradients:
    """What counts of the attempt that broke, by what all ranks of the plan hold of it, and take over the whole sums that this
    rank lacks; None: nothing counts. Raises `PeerLost`; then what each holds is as it was, or more."""
    if held is None:
        for layer in layers.values():
            layer.clear_gradients()
        return nothing_kept(plan)
    for number, layer in layers.items():
        if not held[comm.rank].get(number):
            layer.clear_gradients()
    kept = keep(plan, held)
    for rank, number in kept.dropped:
        if rank == comm.rank:
            layers[number].clear_gradients()
    _take_over(kept, layers, comm)
    return kept


def _take_over(kept: KeptGradients, layers: Mapping[int, HeldLayer], comm: Comm) -> None:
    everything = kept.n_micro_batches
    sent, coming = [], defaultdict[int, list[tuple[Piece, Pending]]](list)
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
