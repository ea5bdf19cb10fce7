"""A schedule as arrays, and the pass that turns durations into start and end times.

The graph of ResiHP's iteration predictor (section 4.3, eq. 2): vertices are chunks; edges are the data (forwards along the
route, backwards against it, weights after their backward) and each rank's order. A chunk starts when both have ended, one pass
in topological order:

    start(v) = max(end(previous chunk of the rank), end(chunk whose output it takes) + time of the message, if ranks differ)

Chunks of equal depth do not depend on each other, so the pass goes level by level, each level as one array operation over all
further axes (replicas, iterations, candidates). Where levels are narrow and there is no further axis, plain numbers are faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = "FBW"
_WIDE = 24  # chunks per level from which arrays beat plain numbers (measured: they break even between 16 and 32)


class Chunks(msgspec.Struct, frozen=True, dict=True):
    """Arrays over chunks, each after all that it needs: `kind` (index into `KINDS`), `micro_batch`, `hop`, `rank`.

    `before` is the position of the rank's previous chunk, `given` of the chunk whose output is taken (-1 = none), `crosses`
    whether that takes a message between ranks.
    """

    kind: Ints
    micro_batch: Ints
    hop: Ints
    rank: Ints
    before: Ints
    given: Ints
    crosses: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    def run(self, durations_us: Array, message_us: float | Array = 0.0) -> tuple[Array, Array]:
        """(start, end) of each chunk when chunk i takes `durations_us[i]`: arrays [chunk, ...further axes].

        `message_us`: time of a message, one number, or per chunk the time of the message that brings its input [chunk].
        """
        late = np.where(self.crosses, np.asarray(message_us, dtype=np.float64), 0.0)
        if durations_us.ndim == 1 and len(self) < _WIDE * len(self._levels):
            return self._run_numbers(durations_us, late)
        start, end = self._run_levels(durations_us, late)
        back = np.empty_like(self._by_level[0])
        back[self._by_level[0]] = np.arange(len(self))
        return start[back], end[back]

    def makespan_us(self, durations_us: Array, message_us: float | Array = 0.0) -> Array:
        """End of the last chunk: [...further axes]."""
        if durations_us.ndim == 1:
            return np.asarray(self.run(durations_us, message_us)[1].max(axis=0))
        late = np.where(self.crosses, np.asarray(message_us, dtype=np.float64), 0.0)
        return np.asarray(self._run_levels(durations_us, late)[1].max(axis=0))

    def _run_numbers(self, durations_us: Array, late: Array) -> tuple[Array, Array]:
        start: list[float] = []
        end = [0.0] * (len(self) + 1)  # the last entry is what -1 stands for: nothing to wait for
        for position, (before, given, spent, wait) in enumerate(
            zip(*self._edges, durations_us.tolist(), late.tolist(), strict=True)
        ):
            begin, ready = end[before], end[given] + wait
            begin = max(begin, ready)
            start.append(begin)
            end[position] = begin + spent
        return np.array(start), np.array(end[:-1])

    def _run_levels(self, durations_us: Array, late: Array) -> tuple[Array, Array]:
        """(start, end) of the chunks in the order of the levels, with one end more: 0, nothing to wait for."""
        order, levels = self._by_level
        spent = durations_us[order]
        wait = late[order].reshape(-1, *[1] * (durations_us.ndim - 1)) if late.any() else None
        start = np.empty_like(spent)
        end = np.zeros((len(self) + 1, *spent.shape[1:]))
        for level, before, given in levels:
            ready = end.take(given, axis=0)  # faster than an index
            if wait is not None:
                ready += wait[level]
            np.maximum(end.take(before, axis=0), ready, out=start[level])
            np.add(start[level], spent[level], out=end[level])
        return start, end

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        return self.before.tolist(), self.given.tolist()

    @cached_property
    def _levels(self) -> list[list[int]]:
        """Positions by depth."""
        depth = [-1] * (len(self) + 1)
        levels: list[list[int]] = []
        for position, (before, given) in enumerate(zip(*self._edges, strict=True)):
            own = depth[position] = max(depth[before], depth[given]) + 1
            if own == len(levels):
                levels.append([])
            levels[own].append(position)
        return levels

    @cached_property
    def _by_level(self) -> tuple[Ints, list[tuple[slice, Ints, Ints]]]:
        """(positions by level, of each level: where it is among them, its `before` and `given` in that numbering)."""
        order = np.array([position for level in self._levels for position in level], dtype=np.int64)
        number = np.empty(len(order) + 1, dtype=np.int64)
        number[order] = np.arange(len(order))
        number[-1] = len(order)
        before, given = number[self.before[order]], number[self.given[order]]
        bounds = np.cumsum([0, *map(len, self._levels)]).tolist()
        return order, [(slice(*ends), before[slice(*ends)], given[slice(*ends)]) for ends in pairwise(bounds)]

    def rank_positions(self) -> Iterator[tuple[int, Ints]]:
        """(rank, positions of its chunks in their order), ranks ascending."""
        if len(self) == 0:
            return
        by_rank = np.argsort(self.rank, kind="stable")
        for positions in np.split(by_rank, np.flatnonzero(np.diff(self.rank[by_rank])) + 1):
            yield int(self.rank[positions[0]]), positions

    def with_messages(self) -> tuple[Chunks, Ints, Ints]:
        """The same chunks with each message as a chunk of its link, so that messages of one link follow each other.

        Returns (chunks, positions of the old chunks in it, positions of the messages in it, in the order of the old chunks that
        take them). A message has kind -1, and its `rank` is -1 - the number of its link.
        """
        takers: dict[int, list[int]] = {}
        for taker in np.flatnonzero(self.crosses).tolist():
            takers.setdefault(int(self.given[taker]), []).append(taker)
        links: dict[tuple[int, int], int] = {}
        rows: list[tuple[int, int, int, int, int, int]] = []
        at = [0] * len(self)
        message_of: dict[int, int] = {}
        last_on: dict[int, int] = {}
        ranks = self.rank.tolist()
        for position, (before, given) in enumerate(zip(*self._edges, strict=True)):
            at[position] = len(rows)
            source = message_of[position] if position in message_of else (at[given] if given >= 0 else -1)
            facts = (int(self.kind[position]), int(self.micro_batch[position]), int(self.hop[position]), ranks[position])
            rows.append((*facts, at[before] if before >= 0 else -1, source))
            for taker in takers.get(position, ()):
                link = links.setdefault((ranks[position], ranks[taker]), len(links))
                message_of[taker] = len(rows)
                rows.append((-1, facts[1], facts[2], -1 - link, last_on.get(link, -1), at[position]))
                last_on[link] = message_of[taker]
        chunks = _chunks(rows, np.zeros(len(rows), dtype=bool))
        messages = np.array([message_of[taker] for taker in np.flatnonzero(self.crosses).tolist()], dtype=np.int64)
        return chunks, np.array(at, dtype=np.int64), messages


def chunks_from(rows: Sequence[tuple[str, int, int, int]], needs: Sequence[tuple[int, int, bool]]) -> Chunks:
    """Chunks of (kind, micro-batch, hop, rank) with their (before, given, crosses)."""
    facts = [
        (KINDS.index(kind), micro_batch, hop, rank, before, given)
        for (kind, micro_batch, hop, rank), (before, given, _) in zip(rows, needs, strict=True)
    ]
    return _chunks(facts, np.array([crosses for _, _, crosses in needs], dtype=bool))


def _chunks(facts: Sequence[tuple[int, int, int, int, int, int]], crosses: NDArray[np.bool_]) -> Chunks:
    columns = np.array(facts, dtype=np.int64).reshape(-1, 6).T.copy()
    kind, micro_batch, hop, rank, before, given = columns
    return Chunks(kind, micro_batch, hop, rank, before, given, crosses)
