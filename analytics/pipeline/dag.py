"""The one evaluator: operations that wait for each other, and how long each takes -> when each starts and ends.

An operation is ready when all that it needs has ended and the way from there is over (a message; a late launch). It starts when
it is ready; the members of a group (both sides of a message, a collective) start together, when the last of them is ready:

    ready(v) = max over what v needs (end(u) + lag(u, v)), 0 when it needs nothing
    start(v) = max of ready over the group of v
    end(v) = start(v) + duration(v)

Operations of equal depth do not depend on each other, so the pass goes level by level, each level as one array operation over
all further axes (replicas, iterations, candidates, scenarios). Where levels are narrow and there is no further axis, plain
numbers are faster.

Schedules (`Chunks`) and recorded traces (diagnosis/trace/replay.py) are such graphs. List scheduling (list_scheduling.py,
planners/adaptis/dispatch.py, planners/resihp/simulation.py) is another thing: it decides the order, which is given here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.collector.events import CHUNK_KINDS, ChunkKind

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Lags = Sequence[Array | None]
"""Per row of `Dag.needs` the time from the end of what is needed: [operation] or [operation, ...further axes]; None = none."""

_WIDE = 24  # operations per level from which arrays beat plain numbers (measured: they break even between 16 and 32)


class Level(msgspec.Struct, frozen=True):
    """Operations whose needs all lie in earlier levels, as numbered by level: `own`, and of each row of needs (its number, what
    is needed). `first` and `sizes` of the groups; None where each operation is alone."""

    own: slice
    needs: tuple[tuple[int, Ints], ...]
    groups: tuple[Ints, Ints] | None


class Dag(msgspec.Struct, frozen=True, dict=True):
    """`needs` [row, operation]: what must have ended, -1 = nothing. `groups`: operations that start together, two or more; all
    others are alone."""

    needs: Ints
    groups: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return int(self.needs.shape[1])

    @cached_property
    def circle(self) -> int | None:
        """An operation that waits for itself by way of others; None where there is an order. Without one nothing can be run."""
        left = np.ones(len(self), dtype=bool)
        left[self._order] = False
        return int(left.argmax()) if left.any() else None

    def run(self, durations_us: Array, lags_us: Lags = ()) -> tuple[Array, Array]:
        """(start, end) of each operation when operation i takes `durations_us[i]`: arrays [operation, ...further axes]."""
        start, end = self._run(durations_us, lags_us)
        return start[self._number[:-1]], end[self._number[:-1]]

    def makespan_us(self, durations_us: Array, lags_us: Lags = ()) -> Array:
        """End of the last operation: [...further axes]."""
        return np.asarray(self._run(durations_us, lags_us)[1].max(axis=0))

    def ready_us(self, end_us: Array) -> Array:
        """When each operation is ready, if they end at these times and there are no lags: [operation, ...further axes]."""
        end = np.concatenate([end_us, np.zeros((1, *end_us.shape[1:]))])
        ready: Array = end[self.needs[0]]
        for needed in self.needs[1:]:
            np.maximum(ready, end[needed], out=ready)
        return ready

    def _run(self, durations_us: Array, lags_us: Lags) -> tuple[Array, Array]:
        """(start, end) by level."""
        order, depths = self._order, self._depths
        further = [1] * (durations_us.ndim - 1)
        lags = [None if lag is None else lag[order].reshape(-1, *(lag.shape[1:] or further)) for lag in lags_us]
        lags += [None] * (len(self.needs) - len(lags))
        spent = durations_us[order]
        if durations_us.ndim == 1 and len(self) < _WIDE * len(depths) and not self.groups:
            return self._run_numbers(spent, lags)
        start = np.empty_like(spent)
        end = np.zeros((len(self) + 1, *spent.shape[1:]))  # the last entry is what -1 stands for: nothing to wait for
        for level in self._levels:
            ready = start[level.own]
            for row, needed in level.needs:
                ended = end.take(
                    needed, axis=0, out=None if row else ready, mode="clip"
                )  # faster than an index; "raise" would buffer
                if (lag := lags[row]) is not None:
                    ended += lag[level.own]
                if row:
                    np.maximum(ready, ended, out=ready)
            if level.groups is not None:
                first, sizes = level.groups
                ready[:] = np.repeat(np.maximum.reduceat(ready, first, axis=0), sizes, axis=0)
            np.add(ready, spent[level.own], out=end[level.own])
        return start, end[:-1]

    def _run_numbers(self, spent: Array, lags: Lags) -> tuple[Array, Array]:
        start: list[float] = []
        end = [0.0] * (len(self) + 1)
        nothing = [0.0] * len(self)
        rows = [(row, nothing if lag is None else lag.tolist()) for row, lag in zip(self._number_lists, lags, strict=True)]
        for position, us in enumerate(spent.tolist()):
            begin = -inf
            for needed, lag in rows:
                ready = end[needed[position]] + lag[position]
                if ready > begin:  # noqa: PLR1730  # max() takes three times as long
                    begin = ready
            start.append(begin)
            end[position] = begin + us
        return np.array(start), np.array(end[:-1])

    @cached_property
    def _members(self) -> dict[int, tuple[int, ...]]:
        """First member -> all members of each group."""
        return {members[0]: members for members in self.groups}

    @cached_property
    def _depths(self) -> list[list[int]]:
        """First members of groups, and operations that are alone, by depth."""
        first_of = list(range(len(self)))
        for first, members in self._members.items():
            for member in members:
                first_of[member] = first
        missing = [0] * len(self)
        after: list[list[int]] = [[] for _ in first_of]
        for row in self.needs.tolist():
            for operation, needed in zip(first_of, row, strict=True):
                if needed >= 0:
                    after[first_of[needed]].append(operation)
                    missing[operation] += 1
        depths = []
        ready = [one for one, count in enumerate(missing) if count == 0 and first_of[one] == one]
        while ready:
            depths.append(ready)
            following = []
            for one in ready:
                for target in after[one]:
                    missing[target] -= 1
                    if missing[target] == 0:
                        following.append(target)
            ready = following
        return depths

    @cached_property
    def _order(self) -> Ints:
        """The operations by depth, groups one behind the other."""
        return np.array([i for depth in self._depths for one in depth for i in self._members.get(one, (one,))], dtype=np.int64)

    @cached_property
    def _number(self) -> Ints:
        """Where each operation is in that order; the last entry is for -1, nothing to wait for."""
        number = np.empty(len(self) + 1, dtype=np.int64)
        number[self._order] = np.arange(len(self))
        number[-1] = len(self)
        return number

    @cached_property
    def _number_lists(self) -> list[list[int]]:
        numbers: list[list[int]] = self._numbered.tolist()
        return numbers

    @cached_property
    def _numbered(self) -> Ints:
        """`needs` in that order and by its numbers."""
        return np.asarray(self._number[self.needs[:, self._order]])

    @cached_property
    def _levels(self) -> list[Level]:
        levels, begin = [], 0
        for depth in self._depths:
            sizes = np.array([len(self._members.get(one, (one,))) for one in depth])
            own = slice(begin, begin := begin + int(sizes.sum()))
            needs = tuple(row[own] for row in self._numbered)
            kept = (row for row, needed in enumerate(needs) if row == 0 or not np.array_equal(needed, needs[row - 1]))
            groups = (np.cumsum(sizes) - sizes, sizes) if len(depth) < own.stop - own.start else None
            levels.append(Level(own, tuple((row, needs[row]) for row in kept), groups))
        return levels


def dag_of(needs: Sequence[Sequence[int]], groups: Iterable[Sequence[int]] = ()) -> Dag:
    """The graph in which operation i waits for `needs[i]`, as many as there are; groups of one are passed over."""
    longest = max((len(needed) for needed in needs), default=0)
    # Rows are filled up with what is needed anyway: an operation that needs something does not wait for time 0.
    rows = [[*needed, *[needed[-1] if needed else -1] * (max(longest, 1) - len(needed))] for needed in needs]
    return Dag(
        np.array(rows, dtype=np.int64).reshape(len(needs), -1).T, tuple(tuple(group) for group in groups if len(group) > 1)
    )


class Messages(msgspec.Struct, frozen=True):
    """What messages cost: numbers, or per chunk that of the message which brings its input, [chunk] or [chunk, ...axes].

    The messages of a link leave one after the other, in the order in which their sender makes them; each occupies the link for
    `link_us`, and has arrived `latency_us` after that. `blocking`: their sender begins nothing else before they have arrived.
    """

    latency_us: float | Array = 0.0
    link_us: float | Array = 0.0
    blocking: bool = False


class Chunks(msgspec.Struct, frozen=True, dict=True):
    """A schedule as such a graph (ResiHP section 4.3, eq. 2): a chunk waits for the one `before` it on its rank, and for the
    one whose output it is `given` and its message, if ranks differ; both are positions, -1 = none. `kind` is the index into
    `CHUNK_KINDS`. All are arrays over chunks.
    """

    kind: Ints
    micro_batch: Ints
    hop: Ints
    rank: Ints
    before: Ints
    given: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def run(self, durations_us: Array, messages: float | Array | Messages = 0.0) -> tuple[Array, Array]:
        """(start, end) of each chunk when chunk i takes `durations_us[i]`: arrays [chunk, ...further axes].

        `messages`: their costs; a number or array is the time on their way alone.
        """
        dag, spent_us, lags_us = self.timed(durations_us, messages)
        start, end = dag.run(spent_us, lags_us)
        return start[: len(self)], end[: len(self)]

    def makespan_us(self, durations_us: Array, messages: float | Array | Messages = 0.0) -> Array:
        """End of the last chunk: [...further axes]."""
        dag, spent_us, lags_us = self.timed(durations_us, messages)
        return dag.makespan_us(spent_us, lags_us)

    def timed(self, durations_us: Array, messages: float | Array | Messages) -> tuple[Dag, Array, Lags]:
        """The graph, with messages as operations of their own where they have to wait or be waited for."""
        costs = messages if isinstance(messages, Messages) else Messages(messages)
        if not costs.blocking and not np.any(costs.link_us):
            if not np.any(costs.latency_us):
                return self._dag, durations_us, (None, None)
            each_us = _per_chunk(costs.latency_us, len(self))
            crosses = self.crosses.reshape(-1, *[1] * (each_us.ndim - 1))
            return self._dag, durations_us, (None, np.where(crosses, each_us, 0.0))
        taken, further = self._taken, durations_us.shape[1:]
        link_us, latency_us = (_per_chunk(of, len(self)) for of in (costs.link_us, costs.latency_us))
        link_us = link_us[taken].reshape(len(taken), *(link_us.shape[1:] or [1] * len(further)))
        spent_us = np.concatenate([durations_us, np.broadcast_to(link_us, (len(taken), *further))])
        arriving, left = np.zeros((2, len(spent_us), *latency_us.shape[1:]))
        arriving[taken] = latency_us[taken]
        behind = np.flatnonzero(self._sent_before >= 0)
        left[behind] = latency_us[taken[self._sent_before[behind]]]
        return self._wired[costs.blocking], spent_us, (None, arriving, left) if costs.blocking else (None, arriving)

    @cached_property
    def _dag(self) -> Dag:
        return _graph(self.before.tobytes() + self.given.tobytes())

    @cached_property
    def _taken(self) -> Ints:
        """The chunks that take a message, in the order in which the messages are made."""
        crossing = np.flatnonzero(self.crosses)
        return np.asarray(crossing[np.argsort(self.given[crossing], kind="stable")])

    @cached_property
    def _sent_before(self) -> Ints:
        """Which message, as `_taken` numbers them, the chunk before sent; -1 = none."""
        sent = np.full(len(self) + 1, -1, dtype=np.int64)
        sent[self.given[self._taken]] = np.arange(len(self._taken))
        return np.asarray(sent[self.before])

    @cached_property
    def _wired(self) -> tuple[Dag, Dag]:
        """The graph with messages as operations behind the chunks: overlapped with their senders' work, and blocking it."""
        taken, number = self._taken, len(self) + np.arange(len(self._taken))
        made = self.given[taken]
        last: dict[tuple[int, int], int] = {}
        previous = made.copy()
        for message, link in enumerate(zip(self.rank[made].tolist(), self.rank[taken].tolist(), strict=True)):
            previous[message] = last.get(link, int(made[message]))
            last[link] = int(number[message])
        given = self.given.copy()
        given[taken] = number
        blocked = np.where(self._sent_before >= 0, len(self) + self._sent_before, given)
        rows = np.stack([np.concatenate(row) for row in ((self.before, made), (given, previous), (blocked, made))])
        return Dag(rows[:2]), Dag(rows)

    @cached_property
    def last(self) -> Ints:
        """The position of each rank's last chunk, ranks ascending."""
        return np.array([positions[-1] for _, positions in self.rank_positions()], dtype=np.int64)

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


@lru_cache(maxsize=64)
def _graph(needs: bytes) -> Dag:
    """The graph of chunks without messages, in two rows. Candidate plans differ in layers and in who executes them, hardly ever
    in this, and its levels take as long to find as to run."""
    return Dag(np.frombuffer(needs, dtype=np.int64).reshape(2, -1))


def _per_chunk(of: float | Array, n: int) -> Array:
    """[chunk, ...axes] of a number or an array."""
    return np.full(n, of) if np.ndim(of) == 0 else np.asarray(of, dtype=np.float64)


def chunks_from(rows: Sequence[tuple[int, int, int, int, int, int]]) -> Chunks:
    """Chunks of (kind, micro-batch, hop, rank, before, given)."""
    return Chunks(*np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy())
