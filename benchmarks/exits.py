"""When a process ended, seen by a process that waits for a core for nobody, where the kernel lets it.

    python -m unskew.benchmarks.exits PID

prints the wall clock in microseconds once the process is gone (its memory given back, its parent told).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress


class ExitWatch:
    """Waits for the end of `pid` in a process of its own."""

    def __init__(self, pid: int) -> None:
        command = [sys.executable, "-P", "-m", "unskew.benchmarks.exits", str(pid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ended_us(self) -> int:
        """Wall clock in microseconds; blocks until the process has ended."""
        return int(self._process.communicate()[0])


def main(pid: int) -> None:
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    ended.poll()
    print(time.time_ns() // 1000)


if __name__ == "__main__":
    main(int(sys.argv[1]))
