"""How soon the store answers while it takes events in: the three questions every dashboard asks, at 1e7 and 5e7 spans.

The store is made up in the collector's form (big_store.py); a collector and eight writers add 10,000 events a second to it.
Each question is asked through the reader once a second, a third of a second after the one before; the refresh before it counts.
The first answers, for which a fresh reader reads the footers of all files, are distinguished; so is how many events came in.
Beside it SQLite with the same spans, a column per field and a JSON payload per row, with indexes on iteration and time, and
nothing written to it meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import duckdb
import msgspec
import numpy as np
from support.store.sqlite_store import SPAN_FIELDS, Form, SqliteStore

from unskew.benchmarks.report import Figure, digits, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.store.big_store import ITERATION_US, RANKS, RUN, SPANS_PER_ITERATION, build
from unskew.benchmarks.store.processes import collector
from unskew.collector.events import IterationCommitted, Span
from unskew.collector.files.rows import LINE
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader, open_store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.channel import readable

SIZES = {10_000_000: 100.0, 50_000_000: 300.0}
"""Spans -> the bar in milliseconds."""
COMPARED_SPANS = 10_000_000
"""SQLite is filled with so many at most: it takes minutes."""
ROUNDS = 40
ROUND_S = 1.0
PER_SECOND = 10_000
WRITERS = 8
CELLS = 200
NEWEST = 200
RECENT = 50

QUESTIONS = {
    "median": f"per-rank median of the last {RECENT} iterations",
    "heat map": "heat map of the whole run",
    "newest": f"newest {NEWEST} events",
}


def figures(bench: Bench, sizes: Sequence[int] = tuple(SIZES), rounds: int = ROUNDS) -> list[Figure]:
    """A figure per question and size; the notes hold the medians and SQLite's times."""
    found = []
    for spans in sizes:
        with tempfile.TemporaryDirectory(prefix="unskew-bench-queries-") as folder:
            store = Store(Path(folder) / "store")
            store.root.mkdir()
            iterations = build(bench, store, spans)
            asked = _ask_while_ingesting(bench, store, iterations, rounds)
            beside = _sqlite(bench, store, Path(folder)) if spans <= COMPARED_SPANS else {}
        for name, what in QUESTIONS.items():
            took_ms = asked.took_ms[name]
            p95_ms = float(np.percentile(took_ms, 95))
            note = f"median {median(took_ms):.0f} ms, {rounds} times, refresh included; "
            note += f"the first time {asked.first_ms[name]:.0f} ms"
            note += "".join(
                f"; {other} {seconds[name] * 1e3:,.0f} ms ({digits(seconds[name] * 1e3 / median(took_ms), 2)}x)"
                for other, seconds in beside.items()
            )
            found.append(
                figure(
                    f"store: {what}, {spans / 1e6:g}e6 spans, p95",
                    p95_ms,
                    "ms",
                    bar=SIZES.get(spans),
                    better="lower",
                    note=note,
                )
            )
        found.append(
            figure(
                f"store: memory of the collector meanwhile, {spans / 1e6:g}e6 spans", asked.memory_mb, "MB", bar=500,
                better="lower", note=f"peak resident; {asked.per_second:,.0f} events/s came in",
            )
        )  # fmt: skip
    return found


def questions(reader: Reader) -> dict[str, Callable[[], object]]:
    """The questions by name, as the dashboard and `unskew sql` ask them."""

    def medians() -> object:
        (last,) = reader.sql("select max(iteration) from iterations where run = ?", [RUN]).row(0)
        return reader.sql(
            "select rank, median(wall_us) from chunks where run = ? and iteration > ? group by rank", [RUN, last - RECENT]
        )

    def heat_map() -> object:
        return reader.sql(
            "with cells as (from rollups where run = ? and kind in ('F', 'B')), "
            "wide as (select greatest(1, max(from_iteration) // ?) as width from cells) "
            "select rank, from_iteration // width as x, sum(compute_us) / sum(n_spans) as us from cells, wide group by all",
            [RUN, CELLS],
        )

    return {"median": medians, "heat map": heat_map, "newest": lambda: reader.newest(NEWEST, RUN)}


class IngestCount(msgspec.Struct):
    """How much came in, and the collector's peak memory; known at the end."""

    per_second: float = 0.0
    memory_mb: float = 0.0


class _Answers(IngestCount):
    """Milliseconds of each question with the refresh before it, the first time and later; how much came in; the collector."""

    first_ms: dict[str, float] = {}
    took_ms: dict[str, list[float]] = {}


def _ask_while_ingesting(bench: Bench, store: Store, iterations: int, rounds: int) -> _Answers:
    answers = _Answers()
    with ingesting(store, iterations, answers), open_store(store) as reader:
        asked = list(questions(reader).items())
        for number in bench.steps("questions while events come in", range((rounds + 1) * len(asked))):
            name, ask = asked[number % len(asked)]
            start_s = time.perf_counter()
            reader.refresh()
            ask()
            took_s = time.perf_counter() - start_s
            if number < len(asked):
                answers.first_ms[name] = 1e3 * took_s
            else:
                answers.took_ms.setdefault(name, []).append(1e3 * took_s)
            time.sleep(max(0.0, ROUND_S / len(asked) - took_s))
    return answers


@contextmanager
def ingesting(store: Store, iterations: int, answers: IngestCount) -> Iterator[None]:
    """Eight writers of 10,000 events a second in all, and a collector that takes them; at the end, how they did."""
    command = [sys.executable, "-m", __spec__.name, str(store.root), str(iterations)]
    with collector(store) as peak_mb:
        producer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert producer.stdout is not None
            producer.stdout.readline()
            yield
        finally:
            output, _ = producer.communicate(b"\n")
    answers.per_second, answers.memory_mb = float(output), peak_mb()


def _produce(root: str, first_iteration: int) -> None:
    """In the child: until something comes on stdin."""
    writers = [SpoolWriter(Store(Path(root)), RUN, f"live-{number}.{os.getpid()}") for number in range(WRITERS)]
    print("writing", flush=True)
    written, began_s = 0, time.monotonic()
    while not readable([sys.stdin], 0.05):
        for number in range(written, int((time.monotonic() - began_s) * PER_SECOND)):
            iteration, rank = first_iteration + number // SPANS_PER_ITERATION, number % RANKS
            writers[rank % WRITERS].append(
                Span(
                    kind="F" if number % 2 else "B",
                    device=f"node-{rank // 8}/gpu-{rank % 8}",
                    rank=rank,
                    plan_version=0,
                    attempt=0,
                    iteration=iteration,
                    start_us=number,
                    wall_us=8000 + number % 900,
                    compute_us=7500,
                    micro_batch=0,
                )
            )
            written += 1
            if written % SPANS_PER_ITERATION == 0:
                _commit(writers, iteration)
    per_second = written / (time.monotonic() - began_s)
    for writer in writers:
        if not writer.close(30.0):
            raise RuntimeError("a producer could not write")
    print(per_second, flush=True)


def _commit(writers: Sequence[SpoolWriter], iteration: int) -> None:
    """Every rank is through with `iteration`."""
    for rank in range(RANKS):
        writers[rank % WRITERS].append(
            IterationCommitted(iteration=iteration, plan_version=0, attempt=0, rank=rank, loss=2.0, tokens=40960, start_us=0,
                               wall_us=ITERATION_US, log_complete=True)
        )  # fmt: skip


def _sqlite(bench: Bench, store: Store, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of each question in SQLite, by form: the best of two."""
    forms: tuple[Form, ...] = ("columns", "json")
    found = {}
    for form in bench.steps("the same in SQLite, as columns and as JSON", forms):
        path = folder / f"{form}.sqlite"
        _fill(store, path, form)
        with sqlite3.connect(path) as connection:
            found[f"SQLite, {form}"] = {
                name: min(_timed(connection, sql) for _ in range(2)) for name, sql in _SQL[form].items()
            }
        path.unlink()
    return found


def _timed(connection: sqlite3.Connection, sql: str) -> float:
    start_s = time.perf_counter()
    connection.execute(sql).fetchall()
    return time.perf_counter() - start_s


def _field(form: Form, name: str) -> str:
    return f'"{name}"' if form == "columns" else f"json_extract(payload, '$.{name}')"


def _question_sql(form: Form) -> dict[str, str]:
    iteration, rank, kind, wall, compute = (
        _field(form, name) for name in ("iteration", "rank", "kind", "wall_us", "compute_us")
    )
    recent = (
        f"select {rank} as rank, {wall} as us from events "
        f"where {iteration} > (select max({iteration}) from events) - {RECENT} and {kind} in ('F', 'B')"
    )
    return {
        "median": f"select rank, avg(us) from (select rank, us, row_number() over (partition by rank order by us) as place, "
        f"count(*) over (partition by rank) as n from ({recent})) where place in ((n + 1) / 2, n / 2 + 1) group by rank",
        "heat map": f"select {rank}, {iteration} / max(1, (select max({iteration}) from events) / {CELLS}), avg({compute}) "
        f"from events where {kind} in ('F', 'B') group by 1, 2",
        "newest": f"select * from events order by at_us desc limit {NEWEST}",
    }


_SQL: dict[Form, dict[str, str]] = {"columns": _question_sql("columns"), "json": _question_sql("json")}


def _fill(store: Store, path: Path, form: Form) -> None:
    """The made-up spans, through no Python object of ours: what is compared is the answer, not how it got in."""
    SqliteStore(path, form).close()
    fields = ", ".join(f'"{name}"' for name in SPAN_FIELDS)
    own = f"{fields}, null" if form == "columns" else LINE
    with sqlite3.connect(path) as target, duckdb.connect(":memory:") as source:
        target.execute("pragma synchronous = off")
        files = f"read_parquet('{store.sealed(RUN)}/*-telemetry.parquet')"
        rows = source.execute(
            f"select writer, seq, at_us, type, {own} from {files} where type = 'span@1' and writer like '%.1'"
        )
        while batch := rows.fetchmany(100_000):
            target.executemany(f"insert into events values ({', '.join('?' * len(batch[0]))})", batch)
        target.execute(f"create index by_iteration on events ({_field(form, 'iteration')})")
        target.execute("create index by_time on events (at_us)")
        target.commit()


if __name__ == "__main__":
    _produce(sys.argv[1], int(sys.argv[2]))
