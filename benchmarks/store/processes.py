"""The processes of which a store is measured: producers that wait for the start, and a collector whose memory is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unskew.collector.paths import Store

PRODUCERS = 8
RUN = "bench"
GIVE_UP_S = 900.0


class StartGate:
    """Lets the producers go."""

    def __init__(self, children: Sequence[subprocess.Popen[str]]) -> None:
        self._children = children

    def __call__(self) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()


class PeakMemory:
    """The most memory a process has had, in MB; it is looked at until it ends."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._peak_kb = 0

    def __call__(self) -> float:
        try:
            lines = self._status.read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith("VmHWM"):
                self._peak_kb = max(self._peak_kb, int(line.split()[1]))
        return self._peak_kb / 1000


@contextmanager
def two_cores() -> Iterator[None]:
    """What is started meanwhile has two cores, whatever the machine has."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def producers(store: Store, each: int, per_second: int) -> Iterator[StartGate]:
    """PRODUCERS processes that wait for the start; at the end all have written everything."""
    module = "unskew.benchmarks.store.producer"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(store.root), RUN, str(rank), str(each), str(per_second)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PRODUCERS)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield StartGate(children)
        for child in children:
            child.communicate(timeout=GIVE_UP_S)
        if any(child.returncode for child in children):
            raise RuntimeError("a producer could not write")
    finally:
        for child in children:
            child.kill()
            child.wait()


@contextmanager
def collector(store: Store) -> Iterator[PeakMemory]:
    """The collector as a process in a session of its own, as others start it, and its peak memory until it has ended."""
    store.root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "unskew.collector.service.process", "--store", str(store.root), "--idle-s", "60"]
    with subprocess.Popen(command, start_new_session=True) as child, watched(child.pid) as peak:
        try:
            yield peak
        finally:
            child.terminate()
            child.wait()


@contextmanager
def watched(pid: int) -> Iterator[PeakMemory]:
    """The peak memory of a process, which may end meanwhile."""
    peak, over = PeakMemory(pid), threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peak()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        over.set()
        watching.join()
