"""What a chunk takes by itself, beside its layers: who begins one has waited, and what it needs is in no cache any more.

By how much the first layer that is executed takes longer than those in the middle of its chunk; so it is known before a plan
gives ranks different numbers of layers. Embedding and head are neither: their layers are no measure.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from unskew.analytics.core.plan import Plan, splits_backward
from unskew.analytics.pipeline.actions import Action
from unskew.collector.events import ChunkKind

OwnTimes = dict[ChunkKind, list[float]]
"""Microseconds by kind of work, of single chunks."""
_FEWEST = 3
"""Layers of a chunk: the first one, one in the middle, and the last."""
EVERY = 4
"""Of so many micro-batches one is measured: it costs some 0.1 ms a chunk, and a median needs no more."""


class ChunkClocks:
    """Of the chunks of an attempt; `clock_ns`: for how long this rank has worked, None = nothing is measured; `turn`: of the
    micro-batches, each of which is measured in every fourth turn."""

    def __init__(self, plan: Plan, clock_ns: Callable[[], int] | None, own_us: OwnTimes, turn: int) -> None:
        self._plan, self._own_us, self._turn = plan, own_us, turn
        self._clock_ns = None if plan.layer_weights or splits_backward(plan.schedule) else clock_ns
        self._open: dict[tuple[int, int], ChunkClock] = {}

    def forward(self, action: Action, parts: int) -> None:
        """The forward pass of a chunk begins now, the backward pass of which has so many parts."""
        if self._clock_ns is None or (action.micro_batch + self._turn) % EVERY:
            return
        if parts == 1 and action.n_layers >= _FEWEST:
            clock = ChunkClock(action, self._plan.n_layers, self._clock_ns, self._own_us)
            self._open[action.micro_batch, action.hop] = clock

    def before(self, action: Action, layer: int, x: Tensor) -> None:
        """The forward pass comes to a layer of it."""
        if (clock := self._open.get((action.micro_batch, action.hop))) is not None:
            clock.before(layer, x)

    def backward(self, action: Action) -> None:
        """Its backward pass begins now."""
        if (clock := self._open.pop((action.micro_batch, action.hop), None)) is not None:
            clock.begin()


class ChunkClock:
    """Of one chunk, whose forward pass begins now: told of each layer before its forward, and of the beginning of the backward
    pass; adds to `own_us`."""

    def __init__(self, action: Action, n_layers: int, clock_ns: Callable[[], int], own_us: OwnTimes) -> None:
        self._first, self._last = action.first_layer, action.first_layer + action.n_layers - 1
        self._has_head, self._clock_ns, self._own_us = self._last == n_layers - 1, clock_ns, own_us
        self._begun_ns = self._second_ns = clock_ns()

    def begin(self) -> None:
        """The pass begins now."""
        self._begun_ns = self._clock_ns()

    def before(self, layer: int, x: Tensor) -> None:
        """`x` is what the layer is given."""
        if layer == self._first + 1:
            self._second()
            x.register_hook(lambda _: self._through("B", counts=not self._has_head))  # type: ignore[no-untyped-call]
        if layer == self._last:
            self._through("F", counts=self._first > 0)
            x.register_hook(lambda _: self._second())  # type: ignore[no-untyped-call]

    def _second(self) -> None:
        self._second_ns = self._clock_ns()

    def _through(self, kind: ChunkKind, *, counts: bool) -> None:
        """All layers but the last one that the pass comes to."""
        if counts:
            first_ns, between_ns = self._second_ns - self._begun_ns, self._clock_ns() - self._second_ns
            own_ns = first_ns - between_ns / (self._last - self._first - 1)
            self._own_us.setdefault(kind, []).append(own_ns / 1000)
