"""Which of some processes have ended, when and how; they are other people's children, so nobody hands us their status."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STOPPED_BY = (signal.SIGTERM, signal.SIGINT)


class Exit(NamedTuple):
    """`status` as waitpid has it; None = the process was reaped before it could be read."""

    rank: int
    at_s: float
    status: int | None

    @property
    def asked(self) -> bool:
        """Whether somebody stopped it: a launcher ends the others so when one has died."""
        return self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in STOPPED_BY

    @property
    def detail(self) -> str:
        if self.status is None:
            return "its process ended"
        if os.WIFSIGNALED(self.status):
            return f"signal {signal.Signals(os.WTERMSIG(self.status)).name}"
        return f"exit code {os.WEXITSTATUS(self.status)}"


class Exits:
    """A thread of its own looks, so that the order of ends within milliseconds is seen however busy the watcher is."""

    def __init__(self) -> None:
        self.seen: list[Exit] = []
        self._poll = select.epoll()
        self._processes: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="exits", daemon=True)
        self._thread.start()

    def watch(self, rank: int, pid: int) -> None:
        """A process of this machine; one that is over already is not seen."""
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            self._processes[descriptor] = rank, pid
            self._poll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._poll.close()
        for descriptor in self._processes:
            os.close(descriptor)

    def _look(self) -> None:
        while not self._over.is_set():
            for descriptor, _ in self._poll.poll(0.2):
                self._poll.unregister(descriptor)
                rank, pid = self._processes[descriptor]
                self.seen.append(Exit(rank, time.monotonic(), _status(pid)))


def _status(pid: int) -> int | None:
    """Of a process that has ended and was not reaped yet: the last field of its line in /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(" ", 1)[1])
    except (OSError, ValueError):
        return None
