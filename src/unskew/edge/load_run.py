"""A run of a store -> the `RunLog` that a diagnosis reads."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any, TypeVar

import msgspec
import polars as pl

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.diagnosis.runlog import NO_STEPS, End, RunLog
from unskew.analytics.diagnosis.sample import sample
from unskew.analytics.diagnosis.trace.model import from_operations, from_spans
from unskew.analytics.loop.intake import BESIDE_CHUNKS, Intake
from unskew.collector.events import (
    CHUNK_KINDS,
    CollectiveRecorded,
    Control,
    Dropped,
    Event,
    GpuState,
    GradientsKept,
    GroupRecorded,
    IterationCommitted,
    IterationTimed,
    MicroBatchPacked,
    RunFinished,
    RunStarted,
    Span,
    tag_of,
)
from unskew.collector.files.tail import decode_event
from unskew.collector.formats.importers import straggler_analysis
from unskew.collector.log_gap import log_gap, with_dropped
from unskew.collector.paths import StoreError
from unskew.collector.read.reader import Reader
from unskew.collector.write.commands import controller_alive

_E = TypeVar("_E", bound=Event)
_SPAN = tuple(field.name for field in msgspec.structs.fields(Span))


def is_imported(reader: Reader, run: str) -> bool:
    """Whether `run`, which must be in the store, was imported from somewhere else."""
    ((clock,),) = reader.sql("select clock from runs where run = ?", [run]).rows()
    return bool(clock == "imported")


def load_run(reader: Reader, run: str) -> RunLog:
    """What the log holds of `run`, which must be in the store; of a long one the iterations of a sample. Raises `StoreError`
    for one that nobody has watched."""
    looked = sample(*_extent(reader, run))
    part = " or ".join(f"iteration between {first} and {last}" for first, last in looked.stretches) if looked else "true"
    about = next(iter(reader.sql("select clock, ranks, options from runs where run = ?", [run]).to_dicts()), None)
    if about is None:
        unknown = f"run {run} was never watched, or its first lines could not be written"
        raise StoreError(f"{unknown}: nothing says what its ranks did together, only sql reads it")
    options: dict[str, Any] = json.loads(about["options"] or "{}")
    plans = {
        row["plan_version"]: Plan.from_data(json.loads(row["plan"]))
        for row in reader.sql("select plan_version, plan from plans where run = ? order by plan_version", [run]).to_dicts()
    }
    spans = reader.sql(
        f"""select spans.* from spans left join iterations using (run, iteration)
           where run = ? and ({part}) and (iterations.attempt is null
             or (spans.attempt = iterations.attempt and spans.plan_version = iterations.plan_version))
           order by spans.iteration, spans.rank, seq""",
        [run],
    )
    control = _control(reader, run)
    started = next((event for event in control if isinstance(event, RunStarted)), None)
    finished = next((event for event in control if isinstance(event, RunFinished)), None)
    commits, packed = _events(reader, run, IterationCommitted, part), _events(reader, run, MicroBatchPacked, part)
    timed = _events(reader, run, IterationTimed, part)
    stepped = pl.DataFrame(
        [(c.iteration, c.plan_version, c.start_us, c.wall_us) for c in commits]
        or [(one.iteration, 0, one.start_us, one.wall_us) for one in timed if one.start_us is not None],
        schema=dict.fromkeys(("iteration", "plan_version", "start_us", "wall_us"), pl.Int64),
        orient="row",
    )
    of_ours = "our_run" in options.get("facts", {})
    exact = straggler_analysis.operations(reader, run, part)
    beside: list[MicroBatchPacked | GpuState | GradientsKept] = [
        *packed,
        *_events(reader, run, GpuState, part),
        *_events(reader, run, GradientsKept, part),
    ]
    again = reader.sql("select iteration from iterations where run = ? and attempt > 0 order by iteration", [run])
    return RunLog(
        run=run,
        sample=looked,
        device_kind=started.device_kind if started else None,
        clock=about["clock"],
        options=options,
        ranks=int(about["ranks"]),
        iterations=reader.sql("select iteration, iteration_us from iterations where run = ? order by iteration", [run]),
        steps=_steps(timed),
        trace=from_operations(exact) if exact.height else from_spans(spans, stepped, plans, votes=of_ours),
        plans=plans,
        released=_released(spans, beside, commits, plans),
        works={} if plans else _works(packed),
        control=control,
        flights=tuple(_events(reader, run, CollectiveRecorded)),
        flight_groups=tuple(_events(reader, run, GroupRecorded)),
        end=_end(reader, run, finished),
        end_reason=finished.reason if finished else "",
        gap=log_gap(started, finished),
        redone=tuple(again["iteration"].to_list()),
        dropped=reduce(with_dropped, _events(reader, run, Dropped), {}),
    )


def _works(packed: list[MicroBatchPacked]) -> dict[int, dict[int, Work]]:
    found: dict[int, dict[int, Work]] = {}
    for one in packed:
        found.setdefault(one.iteration, {})[one.micro_batch] = work_of(one.lengths)
    return found


def _steps(timed: list[IterationTimed]) -> pl.DataFrame:
    """The step times of single ranks, of the attempts that count."""
    last = {(one.iteration, one.rank): one for one in sorted(timed, key=lambda one: one.attempt) if one.rank is not None}
    rows = [(one.iteration, one.rank, one.start_us, one.wall_us) for one in last.values()]
    return pl.DataFrame(rows, schema=NO_STEPS.schema, orient="row")


def _end(reader: Reader, run: str, finished: RunFinished | None) -> End:
    if finished is not None:
        return finished.status
    return "running" if controller_alive(reader.store, run) else "lost"


def _extent(reader: Reader, run: str) -> tuple[int, int, int]:
    """The first and the last iteration, and how many events the log has of them."""
    (first, last, events), *_ = reader.sql(
        """select min(iteration), max(iteration), (select coalesce(sum(n_events), 0) from writers where run = $1)
           from (select iteration from iterations where run = $1
                 union all select from_iteration from rollups where run = $1
                 union all select last_iteration from writers where run = $1)""",
        [run],
    ).rows()
    return first or 0, last or 0, int(events)


def _events(reader: Reader, run: str, kind: type[_E], part: str = "true") -> list[_E]:
    """All events of a telemetry type (of the iterations of `part`, a condition), in the order of their writing."""
    which = f"type like '{tag_of(kind).partition('@')[0]}@%' and ({part})"
    return [event for event in _read(reader, run, "events", which) if isinstance(event, kind)]


def _control(reader: Reader, run: str) -> tuple[Control, ...]:
    """All control events, in the order of their writing."""
    return tuple(event for event in _read(reader, run, "projected.control", "true") if isinstance(event, Control))


def _read(reader: Reader, run: str, source: str, which: str) -> list[Event | None]:
    query = f"select payload::varchar as line from {source} where run = ? and {which} order by seq, writer"
    return [decode_event(line.encode()) for line in reader.sql(query, [run])["line"].to_list()]


def _released(
    spans: pl.DataFrame,
    beside: list[MicroBatchPacked | GpuState | GradientsKept],
    commits: list[IterationCommitted],
    plans: dict[int, Plan],
) -> tuple[IterationTelemetry, ...]:
    """The committed iterations as the controller saw them."""
    if not commits or not plans:
        return ()
    kinds = spans.filter(pl.col("kind").is_in([*CHUNK_KINDS, *BESIDE_CHUNKS, "send", "recv", "all_reduce", "probe"])).select(
        _SPAN
    )
    intake, found = Intake(min(commit.iteration for commit in commits)), []
    arriving: list[Event] = [Span(**row) for row in kinds.iter_rows(named=True)]
    waiting = 0
    while waiting < 30:
        taken = intake.take([*arriving, *beside, *commits], plans) if arriving or commits else intake.take((), plans)
        arriving, beside, commits = [], [], []
        found += taken
        waiting = 0 if taken else waiting + 1
    return tuple(found)
