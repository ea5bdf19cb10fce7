"""For how long a thread was ready to run and had no core: the wall clock without it and without waits is its own time.

Not the thread's CPU clock: a rank that sleeps or reads a slow disk in its forward pass holds up the others just as one that
computes slowly. Where the kernel does not report the time without a core (no schedstat), it counts as the thread's own.
"""

from __future__ import annotations

import os
import threading


class CorelessClock:
    """Of the thread that made it; a look costs 2 us, in a loop that does much else three times as much."""

    def __init__(self) -> None:
        self._last_ns = 0
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read(self) -> int:
        """So far (ns)."""
        if self._file >= 0:
            try:
                self._last_ns = int(os.pread(self._file, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # a loop may close files that it does not know
                self._file = -1
        return self._last_ns
