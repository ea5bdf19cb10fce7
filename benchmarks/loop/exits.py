"""When a process ended, seen by a process that waits for a core for nobody.

    python -m unskew.benchmarks.loop.exits PID

prints the wall clock in microseconds once the process is gone (its memory given back, its parent informed); nothing where the
kernel does not let it pass the queue, for then it would see the end late.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time


class ExitWatch:
    """Waits for the end of `pid` in a process of its own."""

    def __init__(self, pid: int) -> None:
        command = [sys.executable, "-P", "-m", "unskew.benchmarks.loop.exits", str(pid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ended_us(self) -> int | None:
        """Wall clock in microseconds, None where it is unknown; blocks until the process has ended."""
        output = self._process.communicate()[0]
        return int(output) if output else None


def _watch(pid: int) -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except OSError as error:
        print(f"the end of process {pid} cannot be timed: this needs real-time scheduling ({error})", file=sys.stderr)
        return
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    ended.poll()
    print(time.time_ns() // 1000, flush=True)
    os._exit(0)  # nothing more of it before those whose delay is measured


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
