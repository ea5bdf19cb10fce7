"""An iteration's operations played again with other durations: ByteDance's what-if replay.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), sections 3 and 4. The steps:

1. `take_apart`: an operation's launch delay = its start minus the latest end among what it needs; a group's transfer time =
   its end minus the latest start of its members; work that is no group takes what it took;
2. `makespan_us`: ends follow from durations in topological order, at once for all iterations and scenarios;
3. `ideal_us`: work at the mean of its kind over ranks and iterations, communication at its kind's median.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.diagnosis.trace.graph import Graph
from unskew.analytics.pipeline.dag import Array

TOLERANCE_US = 10_000.0
"""Clocks of hosts disagree: what is more negative than this is no measurement, and counts as 0."""


class TraceRecording(msgspec.Struct, frozen=True):
    """Measured operations: [operation, iteration] us from the iteration's start, and the iterations' own times [iteration].

    `waits`: kinds whose duration includes waiting for others (communication), also where they are no group here.
    `left_out`: iterations of the source that lack operations. `pauses_us`: cause -> how much of each operation's launch delay
    it was, [operation, iteration].
    """

    graph: Graph
    iterations: tuple[int, ...]
    start_us: Array
    wall_us: Array
    iteration_us: Array
    waits: frozenset[str]
    left_out: tuple[int, ...] = ()
    pauses_us: dict[str, Array] = {}


class OperationDurations(msgspec.Struct, frozen=True):
    """Durations without waiting: [operation, iteration] us."""

    work_us: Array
    delay_us: Array


def take_apart(recording: TraceRecording) -> OperationDurations:
    """Launch delays, transfer times of groups, and the times of plain work."""
    graph, start = recording.graph, recording.start_us
    end = start + recording.wall_us
    work, delay = recording.wall_us.copy(), start - graph.dag.ready_us(end)
    for group in graph.dag.groups:
        members = list(group)
        work[members] = end[members] - start[members].max(axis=0)
    work[work <= -TOLERANCE_US] = 0.0
    delay[delay <= -TOLERANCE_US] = 0.0
    return OperationDurations(work, delay)


def makespan_us(graph: Graph, work_us: Array, delay_us: Array | None = None) -> Array:
    """The iterations' times when operations take `work_us` [operation, ...further axes]; without `delay_us` none is late."""
    dag = graph.dag
    return dag.makespan_us(work_us, [delay_us] * len(dag.needs))


def ideal_us(recording: TraceRecording, work_us: Array) -> Array:
    """Every kind at its mean over operations and iterations, communication at its median: [operation, iteration]."""
    ideal = work_us.copy()
    for kind in recording.graph.kinds:
        mine = recording.graph.where(kind=kind)
        ideal[mine] = np.median(work_us[mine]) if kind in recording.waits else work_us[mine].mean()
    return ideal
