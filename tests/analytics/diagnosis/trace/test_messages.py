"""Each message is timed by its own two sides, also where a micro-batch passes a rank more than once."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from support.traces.pipeline_spans import logged

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.trace.model import from_spans
from unskew.analytics.diagnosis.trace.replay import makespan_us, take_apart
from unskew.analytics.diagnosis.trace.section import record
from unskew.analytics.loop.intake import Intake
from unskew.analytics.pipeline.schedule import Timeline, build_schedule, evaluate
from unskew.collector.events import Event, IterationCommitted, MicroBatchPacked, Span

MESSAGE_US = 500


def timeline_of(plan: Plan) -> Timeline:
    """Chunks of 1,000 us a layer and kind, a message between ranks takes `MESSAGE_US`."""
    schedule = build_schedule(plan)
    return evaluate(schedule, np.array([1000.0 * action.n_layers for action in schedule.order]), MESSAGE_US)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_a_replay_of_the_spans_takes_as_long_as_the_timeline(schedule: str) -> None:
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=4, schedule=schedule)
    timeline = timeline_of(plan)
    frame = pl.DataFrame(
        [
            {field.name: getattr(span, field.name) for field in msgspec.structs.fields(Span)}
            for span in logged(timeline, MESSAGE_US)
        ]
    )
    commits = pl.DataFrame({"plan_version": [0], "iteration": [0], "start_us": [0]}).with_columns(
        wall_us=pl.lit(round(float(timeline.makespan_us)))
    )
    recording = record(from_spans(frame, commits, {0: plan}))
    messages = [i for i, operation in enumerate(recording.graph.operations) if operation.kind.startswith("recv")]
    assert len(messages) == timeline.schedule.chunks.crosses.sum()
    work = take_apart(recording).work_us
    assert makespan_us(recording.graph, work)[0] == pytest.approx(float(timeline.makespan_us), abs=1)
    assert work[messages].max() == pytest.approx(MESSAGE_US, abs=1)
    assert work.min() >= 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_messages_are_timed_from_the_moment_both_sides_were_ready(schedule: str) -> None:
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=4, schedule=schedule)
    timeline = timeline_of(plan)
    spans = logged(timeline, MESSAGE_US)
    events: list[Event | None] = [
        *spans,
        *(MicroBatchPacked(iteration=0, micro_batch=m, attempt=0, lengths=(8, 8)) for m in range(4)),
        *(
            IterationCommitted(
                iteration=0, plan_version=0, attempt=0, rank=rank, loss=1.0, tokens=64, start_us=0, wall_us=1, log_complete=True
            )
            for rank in (0, 1)
        ),
    ]
    intake = Intake()
    (released,) = [*intake.take(events, {0: plan}), *intake.take((), {0: plan})]
    waited = sum(span.kind == "recv" and span.wall_us > 0 for span in spans)
    times = [transfer.us for transfer in released.committed.transfers]
    assert len(times) == waited
    assert 0 < min(times) <= max(times) == MESSAGE_US
    assert {transfer.us for transfer in released.committed.transfers if transfer.whole} == {MESSAGE_US}
