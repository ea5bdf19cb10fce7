"""Watched trainings of two ranks on real CPU cores as one small table, to be judged again: recorded/watched_jobs.parquet.

    python tests/support/jobs/recorded_jobs.py LOAD CASE...

adds the jobs CASE (attached_job.py), each trained beside LOAD processes that do nothing but compute, to the table. What is kept
of an iteration is what the rules of a watched training read of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl
from support.jobs import attached_job

from unskew.analytics.core.iteration import BesideChunks, Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.workload import Work
from unskew.analytics.detector.options import DetectorOptions, options_for
from unskew.analytics.loop.intake import Intake
from unskew.analytics.loop.watched import attached_rules as rules
from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.collector.events import Event, RankAttached
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store

TABLE = Path(__file__).parent / "recorded" / "watched_jobs.parquet"
RANKS, POLLS = 2, 25
CHUNKS, BESIDE = ("F", "B"), ("optimizer", "other", "data_wait", "gc")
NAMES = {rank: RankAttached(rank=rank, ranks=RANKS, node="node", pid=rank) for rank in range(RANKS)}
PLAN, _ = plan_of(NAMES, dict.fromkeys(range(RANKS), 1))


class RecordedJob(NamedTuple):
    """`load`: how many processes computed beside it, on purpose."""

    case: str
    load: int
    iterations: tuple[IterationTelemetry, ...]

    def judged(self, options: DetectorOptions | None = None) -> list[Event]:
        """What is decided on it, watched."""
        state, first = rules.begin(PLAN, "", options or options_for("cores"))
        events = [*first]
        for one in self.iterations:
            state, found = rules.committed(state, one)
            events += found
        return events


def recorded(table: Path = TABLE) -> Iterator[RecordedJob]:
    """The jobs of the table, in its order."""
    for (case, load), of in pl.read_parquet(table).group_by("case", "load", maintain_order=True):
        rows = [tuple(of.filter(pl.col("rank") == rank).iter_rows(named=True)) for rank in range(RANKS)]
        yield RecordedJob(str(case), int(str(load)), tuple(_iteration(*both) for both in zip(*rows, strict=True)))


def _iteration(*ranks: dict[str, float]) -> IterationTelemetry:
    works = tuple(Work(int(of["tokens"]), int(of["sum_sq"])) for of in ranks)
    first = ranks[0]
    return IterationTelemetry(
        committed=CommittedIteration(
            iteration=int(first["iteration"]),
            plan_version=0,
            chunks=tuple(
                Chunk(rank=rank, kind=kind, n_layers=1, has_head=True, work=works[rank], us=float(of[kind]))
                for rank, of in enumerate(ranks) for kind in CHUNKS
            ),
            works=works,
            measured_us=float(first["measured_us"]),
            log_complete=True,
        ),
        collectives_us=(float(first["collectives_us"]),),
        beside=tuple(BesideChunks(rank, kind, float(of[kind])) for rank, of in enumerate(ranks) for kind in BESIDE),
        without_core={rank: float(of["without_core"]) for rank, of in enumerate(ranks)},
        coreless_us=float(first["coreless_us"]),
    )  # fmt: skip


def _rows(case: str, load: int, released: Sequence[IterationTelemetry]) -> Iterator[dict[str, object]]:
    for one in released:
        for rank in range(RANKS):
            us = dict.fromkeys((*CHUNKS, *BESIDE), 0.0)
            for chunk in one.committed.chunks:
                us[chunk.kind] += chunk.us if chunk.rank == rank else 0.0
            for beside in one.beside:
                us[beside.kind] += beside.us if beside.rank == rank else 0.0
            yield {
                "case": case,
                "load": load,
                "iteration": one.committed.iteration,
                "rank": rank,
                **{kind: round(value) for kind, value in us.items()},
                "tokens": one.committed.works[rank].tokens,
                "sum_sq": one.committed.works[rank].sum_sq,
                "measured_us": round(one.committed.measured_us),
                "collectives_us": round(sum(one.collectives_us)),
                "coreless_us": round(one.coreless_us),
                "without_core": round(one.without_core.get(rank, 0.0), 3),
            }


def train(load: int, cases: Sequence[str]) -> pl.DataFrame:
    """The rows of these jobs, trained one after the other."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory(prefix="unskew-recorded-") as folder:
            store = Store(Path(folder) / "store")
            subprocess.run([sys.executable, attached_job.__file__, str(store.root), folder, *cases], check=True)
            return pl.DataFrame([row for case in cases for row in _rows(case, load, _read(store, case))], schema=SCHEMA)
    finally:
        for process in busy:
            process.kill()
            process.wait()


SCHEMA = {
    "case": pl.String, "load": pl.Int32, "iteration": pl.Int32, "rank": pl.Int32, **dict.fromkeys((*CHUNKS, *BESIDE), pl.Int32),
    "tokens": pl.Int32, "sum_sq": pl.Int32, "measured_us": pl.Int32, "collectives_us": pl.Int32, "coreless_us": pl.Int32,
    "without_core": pl.Float32,
}  # fmt: skip


def _read(store: Store, case: str) -> list[IterationTelemetry]:
    tail, intake, released = Tail(store, attached_job.run_of(case)), Intake(marks_suffice=True), list[IterationTelemetry]()
    for _ in range(POLLS):
        released += intake.take([entry.event for entry in tail.poll()], {0: PLAN})
    return released


def main(load: int, cases: Sequence[str]) -> None:
    before = [pl.read_parquet(TABLE)] if TABLE.exists() else []
    TABLE.parent.mkdir(exist_ok=True)
    pl.concat([*before, train(load, cases)]).write_parquet(TABLE, compression="zstd", compression_level=19)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
