"""An iteration's operations: what waits for what, and the iteration played again with other durations.

An operation is launched when all that it needs has ended. A group (a message with both its sides, a collective with its
members) runs from the moment its last member was launched; what is in no group is plain work. pipeline/dag.py has the pass.

The replay is ByteDance's: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), sections 3 and
4. The steps:

1. `take_apart`: an operation's launch delay = its start minus the latest end among what it needs; a group's transfer time =
   its end minus the latest start of its members; work that is no group takes what it took;
2. `makespan_us`: ends follow from durations in topological order, at once for all iterations and scenarios;
3. `ideal_us`: work at the mean of its kind over ranks and iterations, communication at its kind's median, collectives at that
   of their turn.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.pipeline.dag import Array, Dag, dag_of

TOLERANCE_US = 10_000.0
"""Clocks of hosts disagree: what is more negative than this is no measurement, and counts as 0."""


class GraphError(ValueError):
    """Operations that cannot be replayed; the message is one sentence."""


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation of every iteration: of `kind`, on `rank`, which is `stage` of `replica`. Only a chunk of work has a
    `micro_batch`, which is unique within the replica, and `layers` (first, number), only a message a `peer`, only a collective
    a `turn` among its rank's of its kind and group."""

    kind: str
    rank: int
    replica: int
    stage: int
    micro_batch: int | None = None
    peer: int | None = None
    layers: tuple[int, int] | None = None
    turn: int | None = None

    @property
    def alike(self) -> tuple[str, int | None]:
        """What takes as long when nothing is wrong: a collective of another turn may sum more."""
        return self.kind, self.turn


class Graph(msgspec.Struct, frozen=True, dict=True):
    """`needs[i]`: operations that must have ended before i is launched; `groups`: operations that run together, each in one at
    most."""

    operations: tuple[Operation, ...]
    needs: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]

    def where(self, *, kind: str | None = None, rank: int | None = None, replica: int | None = None, stage: int | None = None
              ) -> NDArray[np.bool_]:  # fmt: skip
        """Which operations are of that kind, rank, replica and stage: [operation]."""
        wanted = (kind, rank, replica, stage)
        return np.array(
            [
                all(want is None or want == is_ for want, is_ in zip(wanted, (o.kind, o.rank, o.replica, o.stage), strict=True))
                for o in self.operations
            ]
        )

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({operation.kind for operation in self.operations}))

    @cached_property
    def dag(self) -> Dag:
        """The graph as it is evaluated. Raises `GraphError` for a circle."""
        dag = dag_of(self.needs, self.groups)
        if dag.circle is not None:
            stuck = self.operations[dag.circle]
            raise GraphError(f"operations wait for each other in a circle, among them {stuck.kind} of rank {stuck.rank}")
        return dag


class TraceRecording(msgspec.Struct, frozen=True):
    """Measured operations: [operation, iteration] us from the iteration's start, and the iterations' own times [iteration].

    `waits`: kinds whose duration includes waiting for others (communication), also where they are no group here.
    `left_out`: iterations of the source that lack operations. `pauses_us`: cause -> how much of each operation's launch delay
    it was, [operation, iteration]; `within_us`: for how long its rank waited for others in the middle of it, `coreless_us`:
    for how long it had no core, `longer_us`: by how much that made it longer, as an emulated device goes on meanwhile.
    """

    graph: Graph
    iterations: tuple[int, ...]
    start_us: Array
    wall_us: Array
    iteration_us: Array
    waits: frozenset[str]
    left_out: tuple[int, ...] = ()
    pauses_us: dict[str, Array] = {}
    within_us: Array | float = 0.0
    coreless_us: Array | float = 0.0
    longer_us: Array | float = 0.0


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
    ideal, alike = work_us.copy(), dict[tuple[str, int | None], list[int]]()
    for i, operation in enumerate(recording.graph.operations):
        alike.setdefault(operation.alike, []).append(i)
    for (kind, _), mine in alike.items():
        ideal[mine] = np.median(work_us[mine]) if kind in recording.waits else work_us[mine].mean()
    return ideal
