"""Getting events into the store: cost in the loop, throughput, memory, freshness, size; beside plain SQLite."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median

from unskew.benchmarks.report import Figure, Steps, figure, silently
from unskew.benchmarks.sqlite_store import Form, SqliteStore
from unskew.benchmarks.store_producer import FLUSH, spans
from unskew.collector import rows
from unskew.collector.ingest import working_database
from unskew.collector.manifest import load
from unskew.collector.paths import Store
from unskew.collector.reader import open_store
from unskew.collector.sealing import write_sorted
from unskew.collector.segment import telemetry_line
from unskew.collector.spool import SpoolWriter
from unskew.collector.tail import Lines

PRODUCERS = 8
FLAT_OUT = 1_000_000
BACKLOG = 3_000_000
FRESH_PER_S, FRESH_S = 10_000, 20.0
LOOP = 200_000
SQLITE = 400_000
SEALED, SEALED_AT_ONCE = 10_000_000, 400_000
RANKS = 64
RUN = "bench"
_GIVE_UP_S = 900.0


def figures(
    flat_out: int = FLAT_OUT,
    backlog: int = BACKLOG,
    fresh_s: float = FRESH_S,
    loop: int = LOOP,
    sealed: int = SEALED,
    *,
    steps: Steps = silently,
) -> list[Figure]:
    """All of them; the counts are of events."""
    with tempfile.TemporaryDirectory(prefix="unskew-store-") as folder:
        root = Path(folder)
        parts: list[Callable[[], list[Figure]]] = [
            lambda: in_the_loop(Store(root / "loop"), loop),
            lambda: throughput(Store(root / "flat"), root, flat_out),
            lambda: lagging(Store(root / "lag"), backlog),
            lambda: freshness(Store(root / "fresh"), fresh_s),
            lambda: sealed_size(Store(root / "size"), sealed),
        ]
        return [one for part in steps("loop, throughput, memory, freshness, size", parts) for one in part()]


def in_the_loop(store: Store, count: int) -> list[Figure]:
    """What a training loop pays: appends, and the hand-over at the end of each iteration of FLUSH events."""
    batches = [list(islice(spans(1), 100 * FLUSH))[start : start + FLUSH] for start in range(0, 100 * FLUSH, FLUSH)]
    writer = SpoolWriter(store, RUN, "rank-0001.1", capacity=10 * FLUSH)
    append_s, hand_over_s = [], []
    for number in range(count // FLUSH):
        began_s = time.perf_counter()
        for event in batches[number % len(batches)]:
            writer.append(event)
        appended_s = time.perf_counter()
        writer.hand_over(5.0)
        hand_over_s.append(time.perf_counter() - appended_s)
        append_s.append(appended_s - began_s)
        time.sleep(0.001)  # the work of an iteration, in which the loop gives the core away
    writer.close()
    each_us = sorted(1e6 * (a + h) / FLUSH for a, h in zip(append_s, hand_over_s, strict=True))
    return [
        figure(
            "store: in the loop, an event at 50 a flush", 1e6 * sum(append_s) / count, "us", bar=1.0, better="lower",
            note=f"mean of the appends; with the wait until the kernel has the flush, median {median(each_us):.2f} us",
        )
    ]  # fmt: skip


def throughput(store: Store, folder: Path, count: int) -> list[Figure]:
    """From the first append of 8 producers until every event is sealed and every projection covers it; the same in SQLite."""
    with _producers(store, count // PRODUCERS, 0) as start, _collector(store) as (pid, peak_mb):
        began_s = start()
        _wait_until_published(store, count)
        seconds = time.monotonic() - began_s
        memory_mb = peak_mb()
        del pid
    manifest = load(store)
    size = sum((store.root / one.file).stat().st_size for one in manifest.sealed) / count
    rates = {form: _sqlite(folder / f"{form}.sqlite", form, SQLITE) for form in ("columns", "json")}
    beside = ", ".join(f"SQLite {form} {rate:,.0f}/s ({count / seconds / rate:.1f}x)" for form, (rate, _) in rates.items())
    sizes = ", ".join(f"SQLite {form} {each:.0f} ({each / size:.0f}x)" for form, (_, each) in rates.items())
    return [
        figure(
            "store: 8 producers flat out, end to end", count / seconds, "events/s", bar=100_000, better="higher",
            note=f"{count:,} events until sealed and projected; {beside}, one writer, a transaction per {FLUSH}",
        ),
        figure(
            "store: memory of the collector, flat out", memory_mb, "MB", bar=500, better="lower", note="peak resident",
        ),
        figure(
            "store: a span of the producers, sealed", size, "bytes", bar=None, better="lower",
            note=f"all fields, {len(manifest.sealed)} files; {sizes}",
        ),
    ]  # fmt: skip


def lagging(store: Store, count: int) -> list[Figure]:
    """A collector that finds a backlog: how fast it catches up, and how much memory it needs."""
    with _producers(store, count // PRODUCERS, 0) as start:
        start()
    with _collector(store) as (_, peak_mb):
        began_s = time.monotonic()
        _wait_until_published(store, count)
        seconds, memory_mb = time.monotonic() - began_s, peak_mb()
    return [
        figure(
            "store: memory of the collector, far behind", memory_mb, "MB", bar=500, better="lower",
            note=f"peak resident with {count:,} events waiting; caught up at {count / seconds:,.0f} events/s",
        )
    ]  # fmt: skip


def freshness(store: Store, seconds: float) -> list[Figure]:
    """The age of each event when a reader first sees it, at 10,000 events a second from 8 producers."""
    ages_ms: list[float] = []
    each = int(FRESH_PER_S / PRODUCERS * seconds) // FLUSH * FLUSH
    with _producers(store, each, FRESH_PER_S // PRODUCERS) as start, _collector(store), open_store(store) as reader:
        until_s = start() + seconds
        seen_pos: dict[str, int] = {}
        while time.monotonic() < until_s:
            reader.refresh()
            last = " or ".join(f"(writer = '{writer}' and seq > {seq})" for writer, seq in seen_pos.items()) or "true"
            known = ", ".join(f"'{writer}'" for writer in seen_pos) or "''"
            fresh = reader.sql(f"select writer, seq, at_us from events where {last} or writer not in ({known})")
            now_us = time.time_ns() / 1000
            ages_ms += [(now_us - at_us) / 1000 for at_us in fresh["at_us"]]
            for writer, seq in fresh.group_by("writer").max().select("writer", "seq").iter_rows():
                seen_pos[writer] = seq
    ages_ms.sort()
    p95 = ages_ms[int(0.95 * len(ages_ms))] if ages_ms else None
    middle = f"median {median(ages_ms):.0f} ms, " if ages_ms else ""
    return [
        figure(
            "store: from append to a reader's view, p95", p95, "ms", bar=250, better="lower",
            note=f"{middle}{len(ages_ms):,} events at {FRESH_PER_S:,}/s, collector running",
        )
    ]  # fmt: skip


def sealed_size(store: Store, count: int) -> list[Figure]:
    """Bytes of a span in sealed files, through the collector's own code: 64 ranks, every span another, lines a moment after."""
    chance, sources = random.Random(3), [spans(rank) for rank in range(RANKS)]
    seqs, total, done = [0] * RANKS, 0, 0
    store.root.mkdir(parents=True)
    while done < count:
        database = working_database(store)
        for rank, source in enumerate(sources):
            lines = []
            for span in islice(source, min(SEALED_AT_ONCE, count) // RANKS):
                at_us = 1_763_000_000_000_000 + span.start_us + span.wall_us + chance.randrange(30, 400)
                lines.append(telemetry_line(seqs[rank], at_us, span))
                seqs[rank] += 1
            rows.insert(database, "hot", RUN, [Lines(f"rank-{rank:04d}.1", 0, b"".join(lines))], done)
            done += len(lines)
        path = store.root / "sealed.parquet"
        write_sorted(database, "hot", path)
        total += path.stat().st_size
        database.close()
    return [
        figure(
            "store: a sealed span", total / done, "bytes", bar=12, better="lower",
            note=f"{done:,} spans of {RANKS} ranks, every field; durations with a device's jitter",
        )
    ]  # fmt: skip


def _sqlite(path: Path, form: Form, count: int) -> tuple[float, float]:
    """Events a second into SQLite, and bytes an event."""
    source = spans(1)
    events = [(time.time_ns() // 1000 + number, next(source)) for number in range(count)]
    store = SqliteStore(path, form)
    began_s = time.monotonic()
    for first in range(0, count, FLUSH):
        store.write("rank-0001.1", first, events[first : first + FLUSH])
    seconds = time.monotonic() - began_s
    store.close()
    return count / seconds, path.stat().st_size / count


@contextmanager
def _producers(store: Store, each: int, per_second: int) -> Iterator[_Start]:
    """PRODUCERS processes that wait for the start; at the end all have written everything."""
    module = "unskew.benchmarks.store_producer"
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
        yield _Start(children)
        for child in children:
            child.communicate(timeout=_GIVE_UP_S)
        if any(child.returncode for child in children):
            raise RuntimeError("a producer could not write")
    finally:
        for child in children:
            child.kill()
            child.wait()


class _Start:
    def __init__(self, children: Sequence[subprocess.Popen[str]]) -> None:
        self._children = children

    def __call__(self) -> float:
        """Let them go; the moment on the monotonic clock."""
        began_s = time.monotonic()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        return began_s


class _Peak:
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
def _collector(store: Store) -> Iterator[tuple[int, _Peak]]:
    """The collector as a process, and its peak memory."""
    store.root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "unskew.collector.service", "--store", str(store.root), "--idle-s", "60"]
    with subprocess.Popen(command) as child:
        peak, over = _Peak(child.pid), threading.Event()
        watching = threading.Thread(target=_watch, args=(peak, over))
        watching.start()
        try:
            yield child.pid, peak
        finally:
            over.set()
            watching.join()
            child.terminate()
            child.wait()


def _watch(peak: _Peak, over: threading.Event) -> None:
    while not over.wait(0.1):
        peak()


def _wait_until_published(store: Store, count: int) -> None:
    """Until `count` events are sealed and every projection covers them."""
    until_s = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < until_s:
        manifest = load(store)
        last = manifest.next_sealing(RUN) - 1
        covered = bool(manifest.published) and max(entry.covers.get(RUN, -1) for entry in manifest.published) == last
        if sum(one.rows for one in manifest.sealed) == count and covered:
            return
        time.sleep(0.02)
    raise TimeoutError(f"the collector has sealed {sum(one.rows for one in load(store).sealed)} of {count} events")
