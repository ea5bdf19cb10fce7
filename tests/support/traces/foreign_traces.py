"""The spans of a pipeline as another system would have recorded them, with whatever went wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import polars as pl
from support.traces.pipeline_spans import logged

from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.model import Trace, from_spans
from unskew.analytics.pipeline.actions import Action
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.collector.events import Span

MESSAGE_US = 500.0
REDUCE_US = 1000
OfChunk = Callable[[int, Action], float]


def spans_of(
    plan: Plan,
    *,
    iterations: int,
    factor: OfChunk = lambda _iteration, _action: 1.0,
    gap_us: OfChunk = lambda _iteration, _action: 0.0,
    reduce_us: Callable[[int], float] = lambda _iteration: REDUCE_US,
    spread: float = 0.2,
    noise: float = 0.01,
    seed: int = 7,
) -> list[Span]:
    """Micro-batches of uneven work (`spread`, log), numbered within their replica. A chunk takes `factor` times as long, and
    begins `gap_us` after it could; gradients are reduced in `reduce_us`. An iteration begins when the one before has ended."""
    random, schedule = np.random.default_rng(seed), build_schedule(plan)
    place = {route.micro_batch: number for of in _by_replica(plan) for number, route in enumerate(of)}
    found: list[Span] = []
    begin_us = 0
    for iteration in range(iterations):
        work = np.exp(random.normal(0, spread, len(plan.routes)))
        us = [
            (1e4 if action.kind == "F" else 2e4)
            * action.n_layers
            * work[action.micro_batch]
            * factor(iteration, action)
            * np.exp(random.normal(0, noise))
            for action in schedule.order
        ]
        late = {(a.rank, a.kind, a.micro_batch, a.first_layer): gap_us(iteration, a) for a in schedule.order}
        timeline = evaluate(schedule, np.array(us) + np.array(list(late.values())), MESSAGE_US)
        for span in logged(timeline, MESSAGE_US, iteration, begin_us):
            gap = round(late.get((span.rank, span.kind, span.micro_batch, span.first_layer), 0.0))
            found.append(
                msgspec.structs.replace(
                    span,
                    micro_batch=place[span.micro_batch or 0],
                    start_us=span.start_us + gap,
                    wall_us=span.wall_us - gap,
                )
            )
        of_iteration = [span for span in found if span.iteration == iteration and span.kind in "FB"]
        free_us = {rank: max(s.start_us + s.wall_us for s in of_iteration if s.rank == rank) for rank in plan.ranks}
        for role in plan.roles:
            rank, free = role.rank, free_us[role.rank]
            rest = {"device": str(rank), "rank": rank, "plan_version": 0, "attempt": 0, "iteration": iteration}
            reduced = round(max(free_us[o.rank] for o in plan.roles if o.stage == role.stage) + reduce_us(iteration))
            found.append(Span(kind="all_reduce", start_us=free, wall_us=reduced - free, **rest))
            found.append(Span(kind="optimizer", start_us=reduced, wall_us=2000, **rest))
        begin_us = max(span.start_us + span.wall_us for span in found if span.iteration == iteration)
    return found


def frame_of(spans: Sequence[Span]) -> pl.DataFrame:
    names = [field.name for field in msgspec.structs.fields(Span)]
    return pl.DataFrame([{name: getattr(span, name) for name in names} for span in spans], infer_schema_length=None)


def trace_of(spans: Sequence[Span], steps: pl.DataFrame | None = None) -> Trace:
    """As the chunk diagnosis reads them, without a plan."""
    return from_spans(frame_of(spans), pl.DataFrame() if steps is None else steps, {})


def log_of(spans: Sequence[Span], steps: pl.DataFrame | None = None) -> RunLog:
    """The log of a run that was imported with these spans."""
    trace = trace_of(spans, steps)
    numbers = trace.iterations.select("iteration", iteration_us=pl.col("end_us") - pl.col("begin_us"))
    n_ranks = len({span.rank for span in spans})
    return RunLog(run="foreign", device_kind=None, clock="imported", options={}, ranks=n_ranks, iterations=numbers, trace=trace)


def _by_replica(plan: Plan) -> Sequence[Sequence[object]]:
    replicas = sorted({route.replica for route in plan.routes})
    return [[route for route in plan.routes if route.replica == replica] for replica in replicas]
