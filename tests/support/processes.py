"""Processes looked at from outside: which are there, since when, and what they have used."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unskew.collector.paths import Store

_COLLECTOR_S = 20.0


def started_at(pid: int) -> str:
    """When a process was started, by the kernel: with the pid it names a process for good; "" when none lives."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def tree(pid: int) -> list[int]:
    """A process and all that descend from it; none when it is gone."""
    with suppress(OSError):
        children = [(thread / "children").read_text().split() for thread in Path(f"/proc/{pid}/task").iterdir()]
        return [pid, *(one for of_thread in children for child in of_thread for one in tree(int(child)))]
    return []


def cpu_s(pid: int) -> float:
    """CPU seconds that a living process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def collectors(store: Store) -> list[int]:
    """The living collector processes of a store, begun by exec or forked: their output goes to its collector.log."""
    log = str(store.root.resolve() / "collector.log")
    return [pid for pid, output in _outputs() if output == log]


def all_collectors() -> set[int]:
    """Those of every store."""
    return {pid for pid, output in _outputs() if output.endswith("/collector.log")}


def _outputs() -> Iterator[tuple[int, str]]:
    """(pid, what its standard output is) of every process."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                yield int(entry.name), str((entry / "fd" / "1").readlink())


def wait_for_collectors(store: Store) -> None:
    """Until the store's collector has ended: by itself when it has nothing left to do."""
    until = time.monotonic() + _COLLECTOR_S
    while collectors(store) and time.monotonic() < until:
        time.sleep(0.1)


def send_signal(pid: int, which: signal.Signals) -> None:
    """To a process that may be gone by now."""
    with suppress(ProcessLookupError):
        os.kill(pid, which)


def processes_of(text: str) -> list[int]:
    """The living processes in whose command or environment a text is, such as a folder's path; not this one."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                known = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
                found += [int(entry.name)] if text.encode() in known else []
    return found
