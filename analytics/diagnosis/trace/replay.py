"""An iteration's operations played again with other durations: ByteDance's what-if replay.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), sections 3 and 4. The steps:

1. `take_apart`: an operation's launch delay = its start minus the latest end among what it needs; a group's transfer time =
   its end minus the latest start of its members; work that is no group takes what it took;
2. `replay`: ends follow from durations in topological order, at once for all iterations and scenarios;
3. `ideal_us`: work at the mean of its kind over ranks and iterations, communication at its kind's median.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.diagnosis.trace.graph import Array, Graph

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
    work, delay = recording.wall_us.copy(), np.empty_like(start)
    ended = np.concatenate([end, np.zeros((1, end.shape[1]))])
    for level in graph.levels:
        delay[level.operations] = start[level.operations] - ended[level.needs].max(axis=1)
        launched = np.repeat(np.maximum.reduceat(start[level.operations], level.first, axis=0), level.sizes, axis=0)
        waited = np.repeat(level.sizes, level.sizes) > 1
        work[level.operations[waited]] = (end[level.operations] - launched)[waited]
    work[work <= -TOLERANCE_US] = 0.0
    delay[delay <= -TOLERANCE_US] = 0.0
    return OperationDurations(work, delay)


def replay(graph: Graph, work_us: Array, delay_us: Array | None = None) -> Array:
    """When each operation ends: [operation, ...further axes] us from the iteration's start; without `delay_us` none is late."""
    end = np.zeros((len(graph.operations) + 1, *work_us.shape[1:]))
    for level in graph.levels:
        start = end[level.needs].max(axis=1)
        if delay_us is not None:
            start = start + delay_us[level.operations]
        launched = np.maximum.reduceat(start, level.first, axis=0)
        end[level.operations] = np.repeat(launched, level.sizes, axis=0) + work_us[level.operations]
    return end[:-1]


def makespan_us(graph: Graph, work_us: Array, delay_us: Array | None = None) -> Array:
    """The iterations' times: [...further axes]."""
    return np.asarray(replay(graph, work_us, delay_us).max(axis=0))


def ideal_us(recording: TraceRecording, work_us: Array) -> Array:
    """Every kind at its mean over operations and iterations, communication at its median: [operation, iteration]."""
    ideal = work_us.copy()
    for kind in recording.graph.kinds:
        mine = recording.graph.where(kind=kind)
        ideal[mine] = np.median(work_us[mine]) if kind in recording.waits else work_us[mine].mean()
    return ideal
