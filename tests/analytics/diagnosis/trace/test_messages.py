"""Each message is timed by its own two sides, also where a micro-batch passes a rank more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from support.traces.pipeline_spans import logged

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.trace.model import from_spans
from unskew.analytics.diagnosis.trace.replay import TraceRecording, makespan_us, take_apart
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


def recorded(*iterations: Sequence[tuple[Any, ...]]) -> TraceRecording:
    """Of two ranks with a layer each; spans are (rank, kind, begin and end in us, micro-batch or None)."""
    spans = []
    for number, of in enumerate(iterations):
        for rank, kind, begin_us, end_us, micro_batch in of:
            about: dict[str, object] = {"plan_version": 0, "epoch": 0, "attempt": 0, "iteration": number, "rank": rank}
            about |= {"first_layer": rank, "n_layers": 1} if kind == "F" else {}
            about |= {"peer": 1 - rank} if kind in ("send", "recv") else {"group": "g"} if kind == "all_reduce" else {}
            times = {"start_us": begin_us, "wall_us": end_us - begin_us, "micro_batch": micro_batch}
            spans.append(msgspec.convert({"type": "span@1", "kind": kind, "device": "cpu", **about, **times}, Span))
    frame = pl.DataFrame([{field.name: getattr(one, field.name) for field in msgspec.structs.fields(Span)} for one in spans])
    n = len(iterations)
    commits = pl.DataFrame({"plan_version": [0] * n, "iteration": [*range(n)], "start_us": [0] * n, "wall_us": [200] * n})
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=2, micro_batches=2)
    return record(from_spans(frame, commits, {0: plan}))


def test_a_chunk_needs_no_collective_that_goes_on_beside_it() -> None:
    """As where a route crosses replicas after a death: rank 0 sums the gradients of its layer 1 with rank 1 while it computes
    what rank 1 waits for before it joins them. `unskew run` and `diagnose` ended in "wait for each other in a circle"."""
    recording = recorded([
        (0, "F", 0, 10, 0), (0, "send", 10, 10, 0), (0, "all_reduce", 10, 100, None), (0, "F", 20, 60, 1),
        (0, "send", 60, 60, 1), (1, "recv", 0, 10, 0), (1, "F", 10, 20, 0), (1, "recv", 20, 60, 1), (1, "F", 60, 90, 1),
        (1, "all_reduce", 90, 100, None),
    ])  # fmt: skip
    parts = take_apart(recording)
    assert makespan_us(recording.graph, parts.work_us, parts.delay_us)[0] == 100
    slower = np.where(recording.graph.where(kind="all_reduce")[:, None], parts.work_us + 30, parts.work_us)
    assert makespan_us(recording.graph, slower, parts.delay_us)[0] == 130


def test_a_chunk_that_once_went_on_beside_a_collective_never_needs_it() -> None:
    """In the first of two iterations the sum was over before the chunk began: the order in which they came decided for both."""
    one = [
        (0, "F", 0, 10, 0), (0, "send", 10, 10, 0), (0, "all_reduce", 10, 20, None), (0, "F", 20, 60, 1),
        (0, "send", 60, 60, 1),
        (1, "recv", 0, 10, 0), (1, "F", 10, 15, 0), (1, "all_reduce", 15, 20, None), (1, "recv", 20, 60, 1),
        (1, "F", 60, 90, 1),
    ]  # fmt: skip
    other = [
        (0, "F", 0, 10, 0), (0, "send", 10, 10, 0), (0, "all_reduce", 10, 30, None), (0, "F", 12, 52, 1),
        (0, "send", 52, 52, 1),
        (1, "recv", 0, 10, 0), (1, "F", 10, 15, 0), (1, "all_reduce", 15, 30, None), (1, "recv", 30, 52, 1),
        (1, "F", 52, 82, 1),
    ]  # fmt: skip
    first, second = recorded(one, other), recorded(other, one)
    assert first.graph == second.graph == recorded(other).graph != recorded(one).graph
