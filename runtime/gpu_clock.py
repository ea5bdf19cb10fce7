"""When things happen on a GPU, by the host's clock: events on its stream, read after the iteration.

The host launches work ahead of the GPU, so its own clock does not know when a chunk begins. An event's time is counted from the
anchor, an event of a moment when the stream was idle, for then the host knows when it happens; nothing waits for an event
within an iteration.

    anchor at 5,000,000 us by the host, the event 12.5 ms after it: it happened at 5,012,500 us
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

TRIES, NARROW_NS = 2, 200_000
"""Where other processes compute on the GPU as well, an event on an idle stream may wait for its turn: the quicker of two is the
anchor, or the first where it took no longer than this."""


class GpuEvent(Protocol):
    """What torch.cuda.Event is."""

    def record(self) -> None:
        """Let it happen when all that was launched so far is through."""

    def synchronize(self) -> None:
        """Wait until it has happened."""

    def elapsed_time(self, later: GpuEvent, /) -> float:
        """Milliseconds from this to a later event, both of which have happened."""


class GpuMoment:
    """A moment on the GPU's stream. Once its time is read, its event is used for another."""

    def __init__(self, event: GpuEvent, anchor: tuple[GpuEvent, int], free: list[GpuEvent]) -> None:
        self._event: GpuEvent | None = event
        self._anchor, self._free = anchor, free
        self._us = 0

    def us(self) -> int:
        """When it was, by the host's clock; waits until it has been."""
        if self._event is not None:
            event, (anchor, anchor_ns) = self._event, self._anchor
            event.synchronize()
            self._us = round(anchor_ns / 1e3 + 1e3 * anchor.elapsed_time(event))
            self._event = None
            self._free.append(event)
        return self._us


class GpuClock:
    """`make` makes an event; `wait` waits until all that this process has launched is through."""

    def __init__(
        self, make: Callable[[], GpuEvent], wait: Callable[[], object], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._make, self._wait, self._now_ns = make, wait, now_ns
        self._free: list[GpuEvent] = []
        self._anchor = self._set_anchor()

    def moment(self) -> GpuMoment:
        """The moment when all that was launched so far is through."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        return GpuMoment(event, self._anchor, self._free)

    def drain(self) -> None:
        """Wait until all that was launched is through; what follows is counted from now."""
        self._anchor = self._set_anchor()

    def _set_anchor(self) -> tuple[GpuEvent, int]:
        self._wait()
        tried: list[tuple[int, int, GpuEvent, int]] = []
        for _ in range(TRIES):
            event, began_ns = self._make(), self._now_ns()
            event.record()
            event.synchronize()
            took_ns = self._now_ns() - began_ns
            tried.append((took_ns, len(tried), event, began_ns + took_ns // 2))
            if took_ns <= NARROW_NS:
                break
        _, _, event, at_ns = min(tried, key=lambda one: one[:2])
        return event, at_ns
