"""Which of some processes have ended, when and how; they are other people's children, so nobody hands us their status."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from unskew.analytics.loop.watched.ends import Exit


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
        """A process of this machine; one that is over already ended nobody knows when."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.seen.append(Exit(rank, None, None))
            return
        except OSError:
            return
        if _is_over(descriptor):
            self.seen.append(Exit(rank, None, _status(pid)))
            os.close(descriptor)
            return
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


def _is_over(descriptor: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _status(pid: int) -> int | None:
    """Of a process that has ended and was not reaped yet: the last field of its line in /proc."""
    try:
        return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().rsplit(" ", 1)[1]))
    except (OSError, ValueError):
        return None
