"""Every template of Malleus' space in arrays, each once: as far as a minute reaches.

The pipelines with straggling groups are chosen one by one: each holds the slowest kind that is left, and of two that begin with
the same kind the later one is no later in the list of contents, so that no template comes twice. The last two pipelines with
straggling groups are chosen in one array operation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray
from support.planning.malleus_templates import Kind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AT_ONCE = 200_000


class Enumerated(msgspec.Struct, frozen=True):
    """The least objective of all templates, how many there are, and whether the enumeration came to its end."""

    objective: float
    templates: int
    whole: bool


class TemplateEnumeration:
    """The templates of one job, as `TemplateSearch` is given it."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        whole: Kind,
        *,
        pipelines: int,
        n_layers: int,
        micro_batches: int,
        limits: Callable[[Sequence[int]], Sequence[int]] | None,
    ) -> None:
        counted = Counter(kind for kind in kinds if kind != whole)
        self._kinds = sorted(counted, key=lambda kind: (-kind[0], kind[1]))
        self._most = np.array([counted[kind] for kind in self._kinds], dtype=np.int64)
        self._strides = np.cumprod([1, *(self._most + 1)[:-1]])[: len(self._kinds)]
        self._pipelines, self._micro_batches = pipelines, micro_batches
        self._base, self._more = divmod(len(kinds), pipelines)
        found = list[tuple[Ints, Floats]]()
        for size in {self._base, self._base + (self._more > 0)}:
            counts = np.indices((*(self._most + 1),)).reshape(len(self._most), int(np.prod(self._most + 1))).T
            counts = counts[counts.sum(axis=1) <= size]
            place = (np.cumsum(counts, axis=1)[:, None, :] <= np.arange(size)[:, None]).sum(axis=2)
            rates = np.array([*(rate for rate, _ in self._kinds), whole[0]])[place]
            degrees = [*(degree for _, degree in self._kinds), whole[1]]
            room = np.array([limits([k] * size) if limits else [n_layers] * size for k in degrees])[place, np.arange(size)]
            found.append((np.column_stack([np.full(len(counts), size), counts]), _least_end(rates, room, n_layers)))
        table, slowest = (np.concatenate(column) for column in zip(*found, strict=True))
        sizes, self._counts, self._slowest = table[:, 0], table[:, 1:], slowest
        self._longer = sizes > self._base
        self._least = sizes if len(kinds) <= micro_batches else np.ones(len(sizes), dtype=np.int64)
        self._keys = self._counts @ self._strides
        self._row = np.full((2, int(np.prod(self._most + 1))), -1, dtype=np.int64)
        self._row[self._longer.astype(np.int64), self._keys] = np.arange(len(sizes))
        self._lead = (self._counts > 0).argmax(axis=1) if self._kinds else np.zeros(len(sizes), dtype=np.int64)

    def best(self, within_s: float) -> Enumerated:
        """All templates, or as many as the time allows."""
        end_s, best, count = time.monotonic() + within_s, inf, 0
        waiting, rows = list[Ints](), 0
        for templates in self._templates():
            waiting.append(templates)
            rows += len(templates)
            if rows > AT_ONCE or time.monotonic() > end_s:
                best, count = min(best, self._least_objective(np.concatenate(waiting))), count + rows
                waiting, rows = [], 0
                if time.monotonic() > end_s:
                    return Enumerated(best, count, whole=False)
        if rows:
            best = min(best, self._least_objective(np.concatenate(waiting)))
        return Enumerated(best, count + rows, whole=True)

    def _templates(self) -> Iterator[Ints]:
        """[n, pipelines] rows of contents."""
        waiting: list[tuple[tuple[int, ...], Ints, int]] = [((), self._most, self._more)]
        while waiting:
            chosen, left, more = waiting.pop()
            places = self._pipelines - len(chosen)
            if not left.any():
                plain = [int(self._row[1, 0])] * more + [int(self._row[0, 0])] * (places - more)
                if min(plain, default=0) >= 0:
                    yield np.array([[*chosen, *plain]])
                continue
            if left.sum() > places * self._base + more:
                continue
            lead = int((left > 0).argmax())
            fits = (self._keys > 0) & (self._lead == lead) & (self._counts <= left).all(axis=1)
            fits &= np.where(self._longer, more > 0, places > more)
            if chosen and self._lead[chosen[-1]] == lead:
                fits[chosen[-1] + 1 :] = False
            rows = np.flatnonzero(fits)
            if places == 1:
                rows = rows[self._keys[rows] == left @ self._strides]
            if places != 2:
                waiting += [((*chosen, row), left - self._counts[row], more - int(self._longer[row])) for row in rows.tolist()]
                continue
            last = self._row[more - self._longer[rows], left @ self._strides - self._keys[rows]]
            follows = (last >= 0) & ((self._keys[last] == 0) | (self._lead[last] != lead) | (last <= rows))
            rows, last = rows[follows], last[follows]
            if len(rows):
                before = np.broadcast_to(np.array(chosen, dtype=np.int64), (len(rows), len(chosen)))
                yield np.column_stack([before, rows, last])

    def _least_objective(self, templates: Ints) -> float:
        """The least ``max o m`` of them: the first T at which the pipelines together take all micro-batches."""
        slowest, least = self._slowest[templates], self._least[templates]
        able = np.isfinite(slowest).all(axis=1) & (least.sum(axis=1) <= self._micro_batches)
        slowest, least = slowest[able], least[able]
        fixed = slowest * least
        return float(
            _least_end(slowest, np.full(slowest.shape, self._micro_batches), self._micro_batches, fixed).min(initial=inf)
        )


def _least_end(each: Floats, room: Ints, total: int, fixed: Floats | None = None) -> Floats:
    """[n] the first time at which parts that take `each` a unit, at most `room`, have done `total` units together, and what is
    `fixed` is done: from the time that nobody can beat on to the next end of a unit. inf where there is no room."""
    ends = total / (1 / each).sum(axis=1)
    if fixed is not None:
        ends = np.maximum(ends, fixed.max(axis=1))
    result = np.full(len(each), inf)
    rows = np.flatnonzero(room.sum(axis=1) >= total)
    while len(rows):
        units = np.minimum(np.floor(ends[rows, None] / each[rows] + 1e-9), room[rows])
        done = units.sum(axis=1) >= total
        result[rows[done]] = ends[rows[done]]
        rows, units = rows[~done], units[~done]
        ends[rows] = np.where(units < room[rows], (units + 1) * each[rows], inf).min(axis=1)
    return result
