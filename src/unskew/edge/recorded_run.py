"""A run of a store, as a replay needs it."""

from __future__ import annotations

from unskew.analytics.replay.recorded_run import RecordedRun, run_of_lines
from unskew.collector.events import GpuState, IterationCommitted, IterationJudged, MicroBatchPacked, Span, tag_of
from unskew.collector.read.reader import Reader


def recorded_run(reader: Reader, run: str) -> RecordedRun:
    """The run's control events, and its telemetry."""
    telemetry = tuple(
        tag_of(event).partition("@")[0] for event in (Span, MicroBatchPacked, IterationCommitted, GpuState, IterationJudged)
    )
    rows = reader.sql(
        "select writer, seq, at_us, stream, payload::varchar as line from events "
        f"where run = ? and (stream is not null or split_part(type, '@', 1) in {telemetry})",
        [run],
    )
    return run_of_lines(run, ((*rest, line.encode()) for *rest, line in rows.iter_rows()))
