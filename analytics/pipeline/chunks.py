"""A schedule as arrays: its chunks, what each waits for, and when they run.

The graph of ResiHP's iteration predictor (section 4.3, eq. 2): vertices are chunks; edges are the data (forwards along the
route, backwards against it, weights after their backward) and each rank's order. dag.py has the pass:

    start(v) = max(end(previous chunk of the rank), end(chunk whose output it takes) + time of the message, if ranks differ)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.pipeline.dag import Array, Dag, Ints
from unskew.collector.events import CHUNK_KINDS, ChunkKind

Flags = NDArray[np.bool_]


class Chunks(msgspec.Struct, frozen=True, dict=True):
    """Arrays over chunks: `kind` (index into `CHUNK_KINDS`), `micro_batch`, `hop`, `rank`.

    `before` is the position of the rank's previous chunk, `given` of the chunk whose output is taken (-1 = none).
    """

    kind: Ints
    micro_batch: Ints
    hop: Ints
    rank: Ints
    before: Ints
    given: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def run(self, durations_us: Array, message_us: float | Array = 0.0) -> tuple[Array, Array]:
        """(start, end) of each chunk when chunk i takes `durations_us[i]`: arrays [chunk, ...further axes].

        `message_us`: time of a message, one number, or per chunk the time of the message that brings its input [chunk].
        """
        return self._dag.run(durations_us, self._lags(message_us))

    def makespan_us(self, durations_us: Array, message_us: float | Array = 0.0) -> Array:
        """End of the last chunk: [...further axes]."""
        return self._dag.makespan_us(durations_us, self._lags(message_us))

    def _lags(self, message_us: float | Array) -> tuple[None, Array | None]:
        return None, np.where(self.crosses, message_us, 0.0) if np.any(message_us) else None

    @cached_property
    def _dag(self) -> Dag:
        return Dag(np.stack([self.before, self.given]))

    @cached_property
    def crosses(self) -> Flags:
        """Whether a chunk's input takes a message between ranks: [chunk]."""
        return np.asarray((self.given >= 0) & (self.rank[self.given] != self.rank))

    def are(self, kind: ChunkKind) -> Flags:
        """Which chunks are of this kind: [chunk]."""
        return np.asarray(self.kind == CHUNK_KINDS.index(kind))

    def rank_positions(self) -> Iterator[tuple[int, Ints]]:
        """(rank, positions of its chunks in their order), ranks ascending."""
        if len(self) == 0:
            return
        by_rank = np.argsort(self.rank, kind="stable")
        for positions in np.split(by_rank, np.flatnonzero(np.diff(self.rank[by_rank])) + 1):
            yield int(self.rank[positions[0]]), positions


def chunks_from(rows: Sequence[tuple[int, int, int, int, int, int]]) -> Chunks:
    """Chunks of (kind, micro-batch, hop, rank, before, given)."""
    return Chunks(*np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy())
