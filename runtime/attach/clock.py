"""The time a thread had for itself: the wall clock without the time it was ready to run and had no core.

Not the thread's CPU clock: a rank that sleeps or reads a slow disk in its forward pass holds up the others just as one that
computes slowly. Where the kernel does not report the time without a core (no schedstat), it counts as the thread's own.
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns

ASK_NS = 50_000
"""The kernel's count costs 2 us to read: after a shorter stretch it is taken to be what it was."""


class ThreadClock:
    """Read only by the thread that made it."""

    def __init__(self) -> None:
        self._last_ns = self._ready_ns = 0
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read(self) -> tuple[int, int]:
        """Now, and for how long the thread has been ready without a core since it began (ns)."""
        now_ns = monotonic_ns()
        if self._file >= 0 and now_ns - self._last_ns >= ASK_NS:
            self._ready_ns = int(os.pread(self._file, 64, 0).split()[1])
        self._last_ns = now_ns
        return now_ns, self._ready_ns

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
