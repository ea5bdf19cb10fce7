"""Which of some processes have ended, when and how; they are other people's children, so nobody hands us their status."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unskew.analytics.loop.watched.ends import Exit


class Exits:
    """A thread of its own looks, so that the order of ends within milliseconds is seen however busy the watcher is."""

    def __init__(self) -> None:
        self.seen: list[Exit] = []
        self._poll = select.epoll()
        self._processes: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        self._ended: dict[int, tuple[float | None, int | None]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="exits", daemon=True)
        self._thread.start()

    def watch(self, rank: int, pid: int) -> None:
        """A rank's process, of this machine; of one that is over already, and was not expected, nobody knows when it ended."""
        self.expect([pid])
        with self._lock:
            self._rank_of[pid] = rank
            if pid in self._ended:
                self.seen.append(Exit(rank, *self._ended[pid]))

    def expect(self, pids: Iterable[int]) -> None:
        """Processes that may turn out to be ranks: how they end is seen from now on."""
        for pid in pids:
            if pid in self._ended or pid in self._processes.values():
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended[pid] = None, None
                continue
            except OSError:
                continue
            if _is_over(descriptor):
                self._ended[pid] = None, _status(pid)
                os.close(descriptor)
                continue
            self._processes[descriptor] = pid
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
                pid = self._processes[descriptor]
                with self._lock:
                    self._ended[pid] = time.monotonic(), _status(pid)
                    if pid in self._rank_of:
                        self.seen.append(Exit(self._rank_of[pid], *self._ended[pid]))


def ranks_under(pid: int) -> list[int]:
    """The processes that were started as ranks (`RANK` is in their environment) by a process, or by who was started by it."""
    found = []
    for child in _children(pid):
        if b"\0RANK=" in b"\0" + _read(Path(f"/proc/{child}/environ")):
            found.append(child)
        else:
            found += ranks_under(child)
    return found


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in _read(task / "children").split()]
    return []


def _read(path: Path) -> bytes:
    """Nothing of a process that is gone."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


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
