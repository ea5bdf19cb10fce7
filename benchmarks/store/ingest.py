"""Getting events into the store: cost in the loop, throughput, memory, freshness, size; beside plain SQLite."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median

from support.store.sqlite_store import Form, SqliteStore

from unskew.benchmarks.report import Figure, digits, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.store.processes import GIVE_UP_S, PRODUCERS, RUN, collector, producers, two_cores
from unskew.benchmarks.store.producer import FLUSH, spans
from unskew.collector.files import rows
from unskew.collector.files.manifest import load
from unskew.collector.files.segment import telemetry_line
from unskew.collector.files.tail import SpoolLines
from unskew.collector.paths import Store
from unskew.collector.projections.published import published_state
from unskew.collector.read.reader import open_store
from unskew.collector.service import compaction
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import write_sorted
from unskew.collector.write.spool import SpoolWriter

FLAT_OUT = 1_000_000
BACKLOG = 3_000_000
FRESH_PER_S, FRESH_S = 10_000, 20.0
LATE_S = 10.0
"""So long is waited for what was not seen at once; it counts as never seen then."""
LOOP = 200_000
SQLITE = 400_000
SEALED, SEALED_AT_ONCE, SPOOLED_AT_ONCE = 10_000_000, 400_000, 2000
RANKS = 64
_START_US = 1_763_000_000_000_000


def figures(
    bench: Bench,
    *,
    flat_out: int = FLAT_OUT,
    backlog: int = BACKLOG,
    fresh_s: float = FRESH_S,
    loop: int = LOOP,
    sealed: int = SEALED,
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
        return [one for part in bench.steps("loop, throughput, memory, freshness, size", parts) for one in part()]


def in_the_loop(store: Store, count: int) -> list[Figure]:
    """What a training loop pays in iterations of FLUSH events: appends, and the hand-over at their end.

    It asks for the flush and goes on, as a rank does when an iteration is committed; or waits for it, as a vote does.
    """
    append_us, asked_us, beside_us = _loop(store, "rank-0001.1", count, wait_s=0.0)
    _, waited_us, _ = _loop(store, "rank-0001.2", count, wait_s=5.0)
    each = count // FLUSH * FLUSH
    return [
        figure(
            f"store: in the loop, an event at {FLUSH} a flush", sum(asked_us) / len(asked_us), "us", bar=1.0, better="lower",
            note=f"mean; the append {append_us:.2f} us, the rest is asking for the flush. The thread that writes it takes "
            f"{beside_us:.2f} us of CPU an event ({each:,}), while the loop gives the core away for 1 ms an iteration",
        ),
        figure(
            "store: the same when the loop waits until the kernel has the flush", median(waited_us), "us",
            better="lower", note=f"median; {median(waited_us) * FLUSH:.0f} us an iteration. A vote waits so, 50 ms at most",
        ),
    ]  # fmt: skip


def _loop(store: Store, name: str, count: int, wait_s: float) -> tuple[float, list[float], float]:
    """Microseconds an event: of the appends, of the appends and the hand-over by iteration, of the other threads' CPU."""
    batches = [list(islice(spans(1), 100 * FLUSH))[start : start + FLUSH] for start in range(0, 100 * FLUSH, FLUSH)]
    writer = SpoolWriter(store, RUN, name, capacity=10 * FLUSH)
    append_s, whole_us = 0.0, []
    process_s, thread_s = time.process_time(), time.thread_time()
    for number in range(count // FLUSH):
        began_s = time.perf_counter()
        for event in batches[number % len(batches)]:
            writer.append(event)
        append_s += time.perf_counter() - began_s
        if wait_s > 0:
            writer.hand_over(wait_s)
        else:
            writer.flush_soon()
        whole_us.append(1e6 * (time.perf_counter() - began_s) / FLUSH)
        time.sleep(0.001)  # the work of an iteration, in which the loop gives the core away
    writer.close()
    beside_s = (time.process_time() - process_s) - (time.thread_time() - thread_s)
    return 1e6 * append_s / count, whole_us, 1e6 * beside_s / count


def throughput(store: Store, folder: Path, count: int) -> list[Figure]:
    """From the first append of 8 producers until every event is sealed and every projection covers it; the same in SQLite."""
    with two_cores(), producers(store, count // PRODUCERS, 0) as start, collector(store) as peak_mb:
        began_s = time.monotonic()
        start()
        _wait_until_published(store, count)
        seconds = time.monotonic() - began_s
    manifest = load(store)
    size = sum((store.root / one.file).stat().st_size for one in manifest.sealed) / count
    compared = min(SQLITE, count)
    forms: tuple[Form, ...] = ("columns", "json")
    measured = {form: _sqlite(folder / f"{form}.sqlite", form, compared) for form in forms}
    rate_of = {form: rate for form, (rate, _) in measured.items()}
    beside = ", ".join(f"SQLite {form} {rate:,.0f}/s ({digits(count / seconds / rate, 2)}x)" for form, rate in rate_of.items())
    sizes = ", ".join(f"SQLite {form} {each:.0f} ({digits(each / size, 2)}x)" for form, (_, each) in measured.items())
    return [
        figure(
            "store: 8 producers flat out, end to end", count / seconds, "events/s", bar=100_000, better="higher",
            note=f"{count:,} events until sealed and in every projection, two cores; {beside}, the first {compared:,} of them "
            f"from one writer, a transaction per {FLUSH}, no projections",
        ),
        figure(
            "store: memory of the collector, flat out", peak_mb(), "MB", bar=500, better="lower", note="peak resident",
        ),
        figure(
            "store: a span of the producers, sealed", size, "bytes", better="lower",
            note=f"all fields, {len(manifest.sealed)} files; {sizes}",
        ),
    ]  # fmt: skip


def lagging(store: Store, count: int) -> list[Figure]:
    """A collector that finds a backlog: how fast it catches up, and how much memory it needs until all is merged as well."""
    with producers(store, count // PRODUCERS, 0) as start:
        start()
    with collector(store) as peak_mb:
        began_s = time.monotonic()
        _wait_until_published(store, count)
        seconds = time.monotonic() - began_s
        while any(compaction.due(load(store), over=frozenset({RUN}))) and time.monotonic() < began_s + GIVE_UP_S:
            time.sleep(0.1)
    return [
        figure(
            "store: memory of the collector, far behind", peak_mb(), "MB", bar=500, better="lower",
            note=f"peak resident with {count:,} events waiting, until they are merged and store.duckdb is written; "
            f"caught up at {count / seconds:,.0f} events/s",
        )
    ]  # fmt: skip


def freshness(store: Store, seconds: float) -> list[Figure]:
    """The age of each event when a reader first sees it, at 10,000 events a second from 8 producers."""
    ages_ms: list[float] = []
    each = int(FRESH_PER_S / PRODUCERS * seconds) // FLUSH * FLUSH
    due = each * PRODUCERS
    with producers(store, each, FRESH_PER_S // PRODUCERS) as start, collector(store), open_store(store) as reader:
        start()
        until_s = time.monotonic() + seconds + LATE_S
        seen_pos: dict[str, int] = {}
        while len(ages_ms) < due and time.monotonic() < until_s:
            reader.refresh()
            last = " or ".join(f"(writer = '{writer}' and seq > {seq})" for writer, seq in seen_pos.items()) or "true"
            known = ", ".join(f"'{writer}'" for writer in seen_pos) or "''"
            fresh = reader.sql(f"select writer, seq, at_us from events where {last} or writer not in ({known})")
            now_us = time.time_ns() / 1000
            ages_ms += [(now_us - at_us) / 1000 for at_us in fresh["at_us"]]
            for writer, seq in fresh.group_by("writer").max().select("writer", "seq").iter_rows():
                seen_pos[writer] = seq
    seen = len(ages_ms)
    ages_ms = sorted(ages_ms + [inf] * (due - seen))
    return [
        figure(
            "store: from append to a reader's view, p95", ages_ms[int(0.95 * due)], "ms", bar=250, better="lower",
            note=f"median {median(ages_ms):.0f} ms, longest {ages_ms[-1]:.0f} ms; {seen:,} seen of {due:,} events "
            f"at {FRESH_PER_S:,}/s, collector running",
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
            lines, first = [], seqs[rank]
            for span in islice(source, min(SEALED_AT_ONCE, count) // RANKS):
                at_us = _START_US + span.start_us + span.wall_us + chance.randrange(30, 400)
                lines.append(telemetry_line(seqs[rank], at_us, span))
                seqs[rank] += 1
            files = [
                SpoolLines(f"rank-{rank:04d}.1", first + at, b"".join(lines[at : at + SPOOLED_AT_ONCE]))
                for at in range(0, len(lines), SPOOLED_AT_ONCE)
            ]
            rows.insert(database, "hot", RUN, files, done)
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
    """Events a second into SQLite, and bytes an event, of what the producers write: a flush of each in turn."""
    sources, each = [spans(rank) for rank in range(PRODUCERS)], count // PRODUCERS // FLUSH * FLUSH
    batches = [
        (f"rank-{rank:04d}.1", first, [(_START_US + span.start_us + span.wall_us, span) for span in islice(source, FLUSH)])
        for first in range(0, each, FLUSH)
        for rank, source in enumerate(sources)
    ]
    store = SqliteStore(path, form)
    began_s = time.monotonic()
    for writer, first, batch in batches:
        store.write(writer, first, batch)
    seconds = time.monotonic() - began_s
    store.close()
    return each * PRODUCERS / seconds, path.stat().st_size / (each * PRODUCERS)


def _wait_until_published(store: Store, count: int) -> None:
    """Until `count` events are sealed and every projection covers them."""
    until_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < until_s:
        manifest = load(store)
        if sum(one.rows for one in manifest.sealed) == count and not published_state(manifest).open:
            return
        time.sleep(0.02)
    raise TimeoutError(f"the collector has sealed {sum(one.rows for one in load(store).sealed)} of {count} events")
