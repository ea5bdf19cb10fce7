"""Faults on purpose: what a run is asked to inject, and that it was."""

from __future__ import annotations

import msgspec

from unskew.collector.events.base import Control, FaultKind, SlowPart

_STRIKING = frozenset({"kill", "hang", "freeze", "exception", "segfault"})


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault that is asked for, or was injected. `until_iteration` None = to the end, `phase` None = every kind of work;
    only a kill has a `point`.

    A slow one is full after `ramp` iterations, there in the first `on` of `every`, and slows what computes or waits for memory
    (`of`). A slow link delays messages from `rank` to `peer` by `delay_ms`. One that strikes does it at a `point`, before a
    chunk of a `phase`, for `seconds` (None: for ever).

    `announced_us`: the rank's wall clock when it was about to carry it out; `watermark` as in `DeviceLost`; neither of what is
    only asked for.
    """

    kind: FaultKind
    rank: int
    at_iteration: int = msgspec.field(name="at")
    until_iteration: int | None = msgspec.field(default=None, name="until")
    factor: float | None = None
    phase: str | None = None
    announced_us: int | None = None
    watermark: int | None = None
    point: str | None = None
    ramp: int | None = None
    every: int | None = None
    on: int | None = None
    of: SlowPart = "compute"
    peer: int | None = None
    delay_ms: float | None = None
    seconds: float | None = None

    @property
    def strikes(self) -> bool:
        """Whether it happens in a moment of its iteration, not over iterations."""
        return self.kind in _STRIKING

    def strength(self, iteration: int) -> float:
        """How much of it is there in this iteration, from 0 to 1."""
        since = iteration - self.at_iteration
        if since < 0 or (self.until_iteration is not None and iteration >= self.until_iteration):
            return 0.0
        if self.every is not None and self.on is not None and since % self.every >= self.on:
            return 0.0
        return 1.0 if self.ramp is None else min(1.0, (since + 1) / self.ramp)

    def slowdown(self, kind: str, iteration: int) -> float:
        """How many times longer a chunk of this kind takes on the fault's rank in this iteration (1.0 = unaffected); of one in
        memory the part that waits for it."""
        if self.factor is None or self.phase not in (None, kind):
            return 1.0
        return 1.0 + (self.factor - 1.0) * self.strength(iteration)

    def delay_us(self, sender: int, receiver: int, iteration: int) -> float:
        """By how much a message over this link arrives later."""
        if self.delay_ms is None or (self.rank, self.peer) != (sender, receiver):
            return 0.0
        return 1e3 * self.delay_ms * self.strength(iteration)


class FaultInjected(Fault, Control, frozen=True, kw_only=True, tag="fault_injected@1"):
    """The truth that verdicts are scored against."""

    # Where a run was asked for it, in its options, these two have the short names that people type.
    at_iteration: int = msgspec.field(name="at_iteration")
    until_iteration: int | None = msgspec.field(default=None, name="until_iteration")
