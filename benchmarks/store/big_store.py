"""A store of a given size, sealed in the collector's form: the log of 64 ranks whose spans are made up by DuckDB, in minutes.

Per rank and iteration ten micro-batches with F, B, a send and a receive (40 spans) and a commit; per iteration a judgement.
Times vary by a hash of where they are; rank 13 is slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec

from unskew.benchmarks.runs import Bench
from unskew.collector import projections
from unskew.collector.events import (
    DeviceJoined,
    Heartbeat,
    IterationCommitted,
    IterationJudged,
    RankRatio,
    RunStarted,
    Span,
    tag_of,
)
from unskew.collector.files import manifest, rows
from unskew.collector.files.manifest import SealedFile
from unskew.collector.files.segment import telemetry_line
from unskew.collector.files.tail import SpoolLines
from unskew.collector.paths import Store
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import extent, seal, write_sorted
from unskew.collector.write.control_stream import ControlStream

RUN = "big"
RANKS = 64
SPANS_PER_RANK = 40
SPANS_PER_ITERATION = RANKS * SPANS_PER_RANK
FILE_ITERATIONS = 400
"""Of one sealed file: a million spans, as after compaction."""
ITERATION_US = 400_000
START_US = 1_700_000_000_000_000
_LINES = SPANS_PER_RANK + 1
"""Of a rank and iteration."""

_SPANS = f"""
insert into hot by name
select '{RUN}' as run, 'rank-' || lpad(rank::varchar, 4, '0') || '.1' as writer, 0 as segment, i * {_LINES} + s as seq,
    {START_US} + i * {ITERATION_US} + s * 9000 + rank * 7 as at_us, '{tag_of(Span)}' as type, i as iteration, rank, 0 as epoch,
    0 as attempt, ['F', 'B', 'send', 'recv'][1 + s % 4] as kind, 'node-' || (rank // 8) || '/gpu-' || (rank % 8) as device,
    s // 4 as micro_batch, i * {ITERATION_US} + s * 9000 + rank * 7 as start_us,
    8000 + (hash(i, rank, s) % 900)::bigint * (1 + (rank = 13)::bigint) as wall_us,
    case when s % 4 < 2 then rank % 16 * 2 end as first_layer, case when s % 4 < 2 then 2 end as n_layers,
    case when s % 4 >= 2 then (rank + 1) % {RANKS} end as peer, case when s % 4 >= 2 then 8388608 end as bytes,
    case when s % 4 >= 2 then i * {ITERATION_US} + s * 9000 end as posted_us,
    case when s % 4 < 2 then 7500 + (hash(i, s, rank) % 900)::bigint end as compute_us,
    case when s % 4 < 2 then (hash(s, i, rank) % 400)::bigint end as wait_pp_us
from range(?, ?) iterations(i), range({RANKS}) ranks(rank), range({SPANS_PER_RANK}) numbers(s)
"""


def build(bench: Bench, store: Store, spans: int) -> int:
    """Fill an empty store with one run of about `spans` spans, sealed and published; returns how many iterations it has."""
    iterations = max(1, spans // SPANS_PER_ITERATION)
    _announce(store, iterations)
    now = manifest.load(store)
    store.make(store.sealed(RUN))
    with duckdb.connect(":memory:") as connection:
        rows.create_table(connection, "hot")
        connection.execute("create view log as select * from hot").fetchall()
        cuts = list(enumerate(_cuts(iterations), 1))
        making = bench.steps(f"a store of {spans / 1e6:g}e6 spans, file by file", cuts)
        files = [_seal(connection, store, number, first, last) for number, (first, last) in making]
        now = msgspec.structs.replace(now, number=now.number + 1, sealed=(*now.sealed, *files))
        published = projections.publish(connection, store, now)
    manifest.publish(store, msgspec.structs.replace(now, published=published))
    return iterations


def _cuts(iterations: int) -> Iterator[tuple[int, int]]:
    for first in range(0, iterations, FILE_ITERATIONS):
        yield first, min(first + FILE_ITERATIONS, iterations)


def _announce(store: Store, iterations: int) -> None:
    """The control events, sealed by the collector's own code."""
    stream = ControlStream(store, RUN, "control", "controller.1")
    started = RunStarted(
        run=RUN, device="made up", clock="imported", mode="observe", ranks=RANKS, options={"iterations": iterations}, code="",
        version="",
    )  # fmt: skip
    joined = [
        DeviceJoined(device=f"node-{rank // 8}/gpu-{rank % 8}", rank=rank, node=f"node-{rank // 8}", pid=1)
        for rank in range(RANKS)
    ]
    stream.append(0, [started, *joined], actor="benchmark")
    stream.close()
    with contextlib.closing(working_database(store)) as database:
        seal(store, database, RUN)
    for leftover in store.root.glob("store.duckdb*"):
        leftover.unlink()  # a collector that finds no database makes one from the sealed files


def _seal(connection: duckdb.DuckDBPyConnection, store: Store, number: int, first: int, last: int) -> SealedFile:
    connection.execute("delete from hot").fetchall()
    connection.execute(_SPANS, [first, last]).fetchall()
    rows.insert(connection, "hot", RUN, list(_others(first, last)))
    path = store.sealed(RUN) / f"{number:06d}-telemetry.parquet"
    source = f"(select * replace (row_number() over (order by seq, writer) + {number * 10**8} as pos) from hot)"
    about = extent(connection, source)
    digest = write_sorted(connection, source, path)
    return msgspec.convert(
        {"run": RUN, "file": str(Path("sealed") / RUN / path.name), "sha256": digest, "replaces": (), "kind": "telemetry",
         "first": number, "last": number, **about},
        SealedFile,
    )  # fmt: skip


def _others(first: int, last: int) -> Iterator[SpoolLines]:
    """Commits and heartbeats of each rank, and the judgements."""
    for rank in range(RANKS):
        data = bytearray()
        for i in range(first, last):
            at_us = START_US + (i + 1) * ITERATION_US - 1
            commit = IterationCommitted(
                iteration=i, plan_version=0, attempt=0, rank=rank, loss=2.0, tokens=40960, start_us=i * ITERATION_US,
                wall_us=ITERATION_US - rank, log_complete=True,
            )  # fmt: skip
            data += telemetry_line(i * _LINES + SPANS_PER_RANK, at_us, commit)
        yield SpoolLines(f"rank-{rank:04d}.1", 0, bytes(data))
    for i in range(first, last):
        ratios = tuple(
            RankRatio(rank=rank, measured_us=160_000 * (2 if rank == 13 else 1), healthy_us=160_000, f=1.0, b=1.0)
            for rank in range(RANKS)
        )
        judged = IterationJudged(
            iteration=i, plan_version=0, measured_us=ITERATION_US, predicted_us=ITERATION_US - 1000, ranks=ratios
        )
        yield SpoolLines("controller.1", 0, telemetry_line(i, START_US + (i + 1) * ITERATION_US, judged))
    beat = Heartbeat(rank=0, pid=1, iteration=last, progress=last, activity="compute", age_us=900, stalled_us=0)
    yield SpoolLines("agent-0.1", 0, telemetry_line(first, START_US + last * ITERATION_US, beat))
