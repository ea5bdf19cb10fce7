"""How soon a person gets an answer from a log of 1e7 spans: the first query on store.duckdb while 10,000 events/s come in, and
commands that read the run, as processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import duckdb

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.store.big_store import RUN, build
from unskew.benchmarks.store.processes import GIVE_UP_S, PeakMemory
from unskew.benchmarks.store.queries import IngestCount, ingesting
from unskew.collector.paths import Store

SPANS = 10_000_000
OPENINGS = 30
OPENING_S = 1.3
"""Not in step with the collector, which writes the file every few seconds."""
WARM_UP_S = 15.0
COMMANDS = (("diagnose", RUN), ("whatif", RUN), ("sql", "--saved", "goodput"))
_FIRST = "select max(last_us), sum(n_events) from writers where run = ? and writer like 'live-%'"


def figures(bench: Bench, spans: int = SPANS, openings: int = OPENINGS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-bench-answers-") as folder:
        store = Store(Path(folder) / "store")
        store.root.mkdir()
        iterations = build(bench, store, spans)
        ingested = IngestCount()
        with ingesting(store, iterations, ingested):
            took_ms, age_s = _open(bench, store, openings)
        commands = [one for command in bench.steps("commands", COMMANDS) for one in _command(store, command, spans)]
    came_in = f"{openings} openings, {spans / 1e6:g}e6 spans there before; {ingested.per_second:,.0f} events/s came in"
    return [
        figure(
            "store: first query on store.duckdb, p95", _p95(took_ms), "ms", bar=300, better="lower",
            note=f"median {median(took_ms):.0f} ms, with the opening; {came_in}",
        ),
        figure(
            "store: age of store.duckdb, the oldest", max(age_s), "s", bar=5, better="lower",
            note=f"since its newest event, median {median(age_s):.1f} s; the collector took {ingested.memory_mb:.0f} MB",
        ),
        *commands,
    ]  # fmt: skip


REFUSED = 2
"""A command that cannot answer says so; it, too, must not take long to find out."""


def _command(store: Store, command: Sequence[str], spans: int) -> list[Figure]:
    """Seconds and memory of a command from its start to its end."""
    line = [sys.executable, "-m", "unskew", *command, "--store", str(store.root)]
    begun_s = time.perf_counter()
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    # What the kernel counts for a child that has ended may be its parent's, from before it became another program.
    peak_mb = PeakMemory(child.pid)
    while child.poll() is None:
        peak_mb()
        time.sleep(0.01)
    took_s = time.perf_counter() - begun_s
    if child.returncode not in (0, REFUSED):
        raise RuntimeError(f"{' '.join(line)} ended with {child.returncode}")
    refusal = ", a refusal" if child.returncode == REFUSED else ""
    what = f"store: unskew {' '.join(command)}, {spans / 1e6:g}e6 spans"
    return [
        figure(what, took_s, "s", bar=5, better="lower", note=f"from its start to its end, one time{refusal}"),
        figure(
            f"{what}, memory", peak_mb(), "MB", bar=1000, better="lower", note="peak resident",
        ),
    ]  # fmt: skip


def _open(bench: Bench, store: Store, openings: int) -> tuple[list[float], list[float]]:
    """Milliseconds of an opening with its first query, and how old the newest event in it is; by one who has nothing open."""
    time.sleep(WARM_UP_S)
    until_s = time.monotonic() + GIVE_UP_S
    while not _newest_us(store) and time.monotonic() < until_s:
        time.sleep(0.1)  # on a machine that is busy with other things, which the collector lets go first
    took_ms, age_s = list[float](), list[float]()
    for _ in bench.steps("first queries on store.duckdb", range(openings)):
        begun_s = time.perf_counter()
        newest_us = _newest_us(store)
        took_ms.append(1e3 * (time.perf_counter() - begun_s))
        age_s.append(time.time() - newest_us / 1e6)
        time.sleep(OPENING_S)
    return took_ms, age_s


def _newest_us(store: Store) -> int:
    """When the newest of the events that come in was written; 0 = none is in store.duckdb yet."""
    if not store.database.exists():
        return 0
    with duckdb.connect(str(store.database), read_only=True) as database:
        database.execute("set variable store = ?", [str(store.root)]).fetchall()
        ((newest_us, _),) = database.execute(_FIRST, [RUN]).fetchall()
    return int(newest_us or 0)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]
