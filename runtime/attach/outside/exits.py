"""Which of some processes have ended, when and how; they are other people's children, so nobody hands us their status."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unskew.analytics.loop.watched.ends import Exit
from unskew.runtime.node.processes import began_at, exit_status


class Process(NamedTuple):
    """Its number, which is used again after its end, and when it began (ticks), which tells it from those; None = it was gone
    when it was first looked at."""

    pid: int
    began: int | None


class Exits:
    """A thread of its own looks, so that the order of ends within milliseconds is seen however busy the watcher is."""

    def __init__(self) -> None:
        self.seen: list[Exit] = []
        self._poll = select.epoll()
        self._last: dict[int, Process] = {}
        self._processes: dict[int, Process] = {}
        self._rank_of: dict[Process, int] = {}
        self._ended: dict[Process, tuple[float | None, int | None]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="exits", daemon=True)
        self._thread.start()

    def watch(self, rank: int, pid: int) -> None:
        """A rank's process, of this machine; of one that is over already, and was not expected, nobody knows when it ended."""
        self.expect([pid])
        if (process := self._last.get(pid)) is None:
            return
        with self._lock:
            self._rank_of[process] = rank
            if process in self._ended:
                self.seen.append(Exit(rank, *self._ended[process]))

    def expect(self, pids: Iterable[int]) -> None:
        """Processes that may turn out to be ranks: how they end is seen from now on."""
        for pid in pids:
            process = Process(pid, began_at(pid))
            if (last := self._last.get(pid)) is not None and process.began in (None, last.began):
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._last[pid] = process
                self._ended[process] = None, None
                continue
            except OSError:
                continue
            self._last[pid] = process
            if _is_over(descriptor):
                self._ended[process] = None, _status(process)
                os.close(descriptor)
                continue
            self._processes[descriptor] = process
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
                process = self._processes[descriptor]
                with self._lock:
                    self._ended[process] = time.monotonic(), _status(process)
                    if process in self._rank_of:
                        self.seen.append(Exit(self._rank_of[process], *self._ended[process]))


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


def _status(process: Process) -> int | None:
    """Of one that has ended and was not reaped yet."""
    ended = exit_status(process.pid) if began_at(process.pid) == process.began else None
    return None if ended is None else os.waitstatus_to_exitcode(ended)
