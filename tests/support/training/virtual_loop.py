"""A clock that passes when it is told to, for the timelines of watched loops."""

from __future__ import annotations


class VirtualClock:
    """Milliseconds; some of them without a core."""

    def __init__(self) -> None:
        self.ns = self.ready_ns = self.asked = 0

    def now(self) -> int:
        return self.ns

    def ready(self) -> int:
        self.asked += 1
        return self.ready_ns

    def work(self, ms: int, *, without_core: int = 0) -> None:
        self.ns += (ms + without_core) * 1_000_000
        self.ready_ns += without_core * 1_000_000
