"""What waits for what in an iteration: operations, and the groups of them that end together.

An operation is launched when all that it needs has ended. A group (a message with both its sides, a collective with its
members) runs from the moment its last member was launched; a group of one is plain work. Times are arrays [operation,
...further axes] (iterations, scenarios): they go through in one pass.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class GraphError(ValueError):
    """Operations that cannot be replayed; the message is one sentence."""


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation of every iteration: what `kind` says, on `rank`, which is `stage` of `replica`. Only a chunk of work has a
    `micro_batch`, which is unique within the replica, and `layers` (first, number), only a message a `peer`."""

    kind: str
    rank: int
    replica: int
    stage: int
    micro_batch: int | None = None
    peer: int | None = None
    layers: tuple[int, int] | None = None


class GraphLevel(msgspec.Struct, frozen=True):
    """Operations whose needs all lie in earlier levels. `operations` holds groups one behind the other, `first` their
    beginnings, `sizes` their lengths; `needs` [operation, k] is filled up with the number of no operation."""

    operations: Indices
    needs: Indices
    first: Indices
    sizes: Indices


class Graph(msgspec.Struct, frozen=True, dict=True):
    """`needs[i]`: operations that must have ended before i is launched; `groups`: every operation in exactly one."""

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
    def group_of(self) -> Indices:
        found = np.full(len(self.operations), -1, dtype=np.intp)
        for number, members in enumerate(self.groups):
            found[list(members)] = number
        return found

    @cached_property
    def levels(self) -> tuple[GraphLevel, ...]:
        """All groups in an order in which each comes after everything that it needs. Raises `GraphError` for a circle."""
        group_of = self.group_of
        before: list[set[int]] = [{int(group_of[n]) for i in members for n in self.needs[i]} for members in self.groups]
        after: list[list[int]] = [[] for _ in self.groups]
        for group, sources in enumerate(before):
            for source in sources:
                after[source].append(group)
        missing = [len(sources) for sources in before]
        ready = [group for group, count in enumerate(missing) if count == 0]
        levels, placed = [], 0
        while ready:
            levels.append(self._level(ready))
            placed += len(ready)
            following = []
            for group in ready:
                for target in after[group]:
                    missing[target] -= 1
                    if missing[target] == 0:
                        following.append(target)
            ready = following
        if placed < len(self.groups):
            stuck = next(self.operations[self.groups[g][0]] for g, count in enumerate(missing) if count)
            raise GraphError(f"operations wait for each other in a circle, among them {stuck.kind} of rank {stuck.rank}")
        return tuple(levels)

    def _level(self, groups: list[int]) -> GraphLevel:
        members = [i for group in groups for i in self.groups[group]]
        sizes = np.array([len(self.groups[group]) for group in groups])
        width = max(1, *(len(self.needs[i]) for i in members)) if members else 1
        nothing = len(self.operations)
        needs = np.full((len(members), width), nothing, dtype=np.intp)
        for row, i in enumerate(members):
            needs[row, : len(self.needs[i])] = self.needs[i]
        first = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        return GraphLevel(np.array(members), needs, first, sizes)
