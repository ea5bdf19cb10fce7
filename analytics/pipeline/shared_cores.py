"""A graph of operations on ranks that share fewer cores than they are: when each runs."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

import msgspec
import numpy as np

from unskew.analytics.pipeline.dag import Array, Dag, Ints, Lags


class Cores(msgspec.Struct, frozen=True):
    """So many, shared by all ranks of a graph. `held_us`: how long each operation works on one at first, [operation, ...axes as
    its duration]; for the rest it needs none (a slow device that only waits), nor do operations behind these (messages).
    `ranks` [operation]: how many execute it together; None = one each."""

    number: int
    held_us: Array
    ranks: Ints | None = None


def run_on_cores(dag: Dag, durations_us: Array, lags_us: Lags, cores: Cores) -> tuple[Array, Array]:
    """(start, end) of each operation, as `Dag.run` gives them for ranks with a core each. Raises `ValueError` for a graph with
    groups or a circle.

    Where more ranks work than there are cores each goes on at the same lower rate, as under a fair kernel scheduler (processor
    sharing): min(1, cores / ranks at work). Since all go on alike one clock counts the work that each has done: an operation
    leaves its core when that clock has advanced by what it holds. Two of 10 ms on one core; then one of them half asleep:

    >>> from unskew.analytics.pipeline.dag import dag_of
    >>> both, durations = dag_of([[], []]), np.array([10.0, 10.0])
    >>> run_on_cores(both, durations, (), Cores(1, durations))[1].tolist()
    [20.0, 20.0]
    >>> run_on_cores(both, durations, (), Cores(1, np.array([10.0, 5.0])))[1].tolist()
    [15.0, 15.0]
    """
    if dag.groups or dag.circle is not None:
        raise ValueError("cores are shared among operations that start by themselves and do not wait in a circle")
    further, behind = durations_us.shape[1:], len(dag) - len(cores.held_us)
    held_us = np.concatenate([np.minimum(cores.held_us, durations_us[: len(cores.held_us)]), np.zeros((behind, *further))])
    lags = np.zeros((len(dag.needs), len(dag), *further))
    for row, lag in enumerate(lags_us):
        if lag is not None:
            lags[row] = lag.reshape(-1, *(lag.shape[1:] or [1] * len(further)))
    shared = _CoreSharing(dag, [1] * len(dag) if cores.ranks is None else [*cores.ranks.tolist(), *[1] * behind], cores.number)
    columns = (of.reshape(*of.shape[: of.ndim - len(further)], -1) for of in (durations_us, held_us, lags))
    ran = [shared.run(*of) for of in zip(*(np.moveaxis(of, -1, 0).tolist() for of in columns), strict=True)]
    start, end = (np.array(of).T.reshape(durations_us.shape) for of in zip(*ran, strict=True))
    return start, end


class _CoreSharing:
    """A graph on so many cores. `after`: per operation who needs it, and in which row."""

    def __init__(self, dag: Dag, ranks: Sequence[int], cores: int) -> None:
        self.ranks, self.cores = ranks, cores
        self.after: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.missing = [0] * len(ranks)
        for row, needed in enumerate(dag.needs.tolist()):
            for operation, one in enumerate(needed):
                if one >= 0:
                    self.after[one].append((operation, row))
                    self.missing[operation] += 1

    def run(
        self, spent: Sequence[float], held: Sequence[float], lags: Sequence[Sequence[float]]
    ) -> tuple[list[float], list[float]]:
        """(start, end): `moments` holds what the wall clock brings (an operation gets ready, or ends), `working` who leaves its
        core at which time of the clock that counts work."""
        start, end, ready = ([0.0] * len(spent) for _ in range(3))
        missing = [*self.missing]
        moments = [(0.0, operation, False) for operation, count in enumerate(missing) if count == 0]
        working: list[tuple[float, int]] = []
        now, worked, busy = 0.0, 0.0, 0
        while moments or working:
            rate = min(1.0, self.cores / busy) if busy else 1.0
            leaves = now + (working[0][0] - worked) / rate if working else inf
            if not moments or leaves <= moments[0][0]:
                worked, operation = heappop(working)
                now, busy = leaves, busy - self.ranks[operation]
                heappush(moments, (now + spent[operation] - held[operation], operation, True))
                continue
            moment, operation, over = heappop(moments)
            now, worked = moment, worked + (moment - now) * rate
            if over:
                end[operation] = now
                for following, row in self.after[operation]:
                    ready[following] = max(ready[following], now + lags[row][following])
                    missing[following] -= 1
                    if missing[following] == 0:
                        heappush(moments, (ready[following], following, False))
                continue
            start[operation] = now
            if held[operation] > 0.0:
                heappush(working, (worked + held[operation], operation))
                busy += self.ranks[operation]
            else:
                heappush(moments, (now + spent[operation], operation, True))
        return start, end
