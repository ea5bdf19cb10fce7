"""What waits for what in an iteration: operations, and the groups of them that end together.

An operation is launched when all that it needs has ended. A group (a message with both its sides, a collective with its
members) runs from the moment its last member was launched; what is in no group is plain work. pipeline/dag.py has the pass.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.pipeline.dag import Dag, dag_of


class GraphError(ValueError):
    """Operations that cannot be replayed; the message is one sentence."""


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation of every iteration: of `kind`, on `rank`, which is `stage` of `replica`. Only a chunk of work has a
    `micro_batch`, which is unique within the replica, and `layers` (first, number), only a message a `peer`."""

    kind: str
    rank: int
    replica: int
    stage: int
    micro_batch: int | None = None
    peer: int | None = None
    layers: tuple[int, int] | None = None


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
