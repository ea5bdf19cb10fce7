"""Which straggling groups share a pipeline: Malleus' search over templates, exact where a full enumeration could end.

A template deals the straggling groups over the pipelines; stage counts differ by at most one, whole groups fill up. With o_i
the slowest stage of pipeline i (ILP 1) an objective T can be reached when each takes ``floor(T / o_i)`` micro-batches, at least
one per stage, and together they take M. All groups at work without rest would take ``T / L x sum 1 / y``: each pipeline
*wastes* its part of that less what it takes, and T can be reached when all waste together is at most
``T / L x sum 1 / y - M``. Near the optimum that is little, so few contents of a pipeline are cheap enough, and a search over
them, pipeline by pipeline, each with the slowest group that is left, is short. T is enlarged from its lower bound until a
template is found, then bisected.

Groups of equal rate and degree are one kind. With c_v groups of kind v there are ``prod (c_v + 1)`` contents of a pipeline,
which are timed once and sorted for each of some 20 values of T; above `CONTENTS` of them neighbouring rates count as one, the
slower. For each pipeline at most `WIDTH` states are kept, those with the least waste, and `MOVES` contents weighed for them.
The search is exact unless one of these limits binds; their product with the pipelines bounds its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf, prod

import msgspec
import numpy as np

from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.problem import Floats, Ints

CONTENTS = 1 << 18
WIDTH = 2_000
MOVES = 1_000_000
FIRST_STEP = 0.002
EXACT = 1e-9
BETTER = 1e-8
"""Less than `EXACT` could tell apart from the best known is no better: what only reaches that again must not be found."""

Kind = tuple[float, int]
"""Rate and degree of a group."""
Template = list[tuple[Kind, ...]]
"""Per pipeline its groups: straggling ones first, the slowest in front."""
Limits = Callable[[Sequence[int]], Sequence[int]]
"""Degrees of a pipeline's groups, in order -> the most layers that each holds."""


class Contents(msgspec.Struct, frozen=True, eq=False):
    """What a pipeline may hold: straggling groups of each kind [n, kinds], stages [n], ``sum 1 / y`` [n], slowest stage [n]."""

    counts: Ints
    sizes: Ints
    weights: Floats
    slowest: Floats


class TemplateSearch:
    """Templates of one job: groups of these kinds over `pipelines`; `limits` None: any group holds any number of layers."""

    def __init__(
        self, kinds: Sequence[Kind], whole: Kind, *, pipelines: int, n_layers: int, micro_batches: int, limits: Limits | None
    ) -> None:
        self._whole, self._pipelines, self._n_layers, self._micro_batches = whole, pipelines, n_layers, micro_batches
        self._limits = limits
        self._straggling = sorted((kind for kind in kinds if kind != whole), key=lambda kind: (-kind[0], kind[1]))
        self._total = len(kinds)
        self._base, self._more = divmod(len(kinds), pipelines)
        self._stages_at_least = len(kinds) <= micro_batches

    def best(self) -> tuple[float, Template] | None:
        """(objective, template) with the least objective; None when the layers fit no template."""
        merged = _merged(self._straggling)
        contents = self._contents(merged)
        weight = sum(1.0 / rate for rate, _ in self._straggling) + self._total - len(self._straggling)
        lowest = self._micro_batches * self._n_layers / weight
        even = self._even()
        best = (self.objective(even), even)
        highest = 2.0 * self._micro_batches * self._n_layers * max([1.0, *(rate for rate, _ in merged)])
        step = FIRST_STEP
        while lowest < min(best[0], highest) * (1 - BETTER):
            near = min(best[0], highest)
            if best[0] < lowest * (1 + FIRST_STEP):
                target = best[0] * (1 - BETTER)
            else:
                target = min(lowest * (1 + step), (lowest + near) / 2 if np.isfinite(best[0]) else near)
            found = self._reached(contents, merged, target)
            if found is None:
                lowest, step = target, step * 2
                continue
            best, step = (self.objective(found), found), FIRST_STEP
        return best if np.isfinite(best[0]) else None

    def objective(self, template: Template) -> float:
        """``max o_i m_i`` with the best micro-batches (ILP 2); inf when the layers or the micro-batches do not fit."""
        slowest = [
            slowest_stage([rate for rate, _ in part], self._n_layers, self._limits and self._limits([k for _, k in part]))
            for part in template
        ]
        least = [len(part) if self._stages_at_least else 1 for part in template]
        if self._micro_batches < sum(least) or inf in slowest:
            return inf
        counts = share_out(self._micro_batches, [(0.0, o) for o in slowest], least=least)
        return max(m * o for m, o in zip(counts, slowest, strict=True))

    def _even(self) -> Template:
        """The slowest group first to the pipeline that has lost least and has room."""
        sizes = [self._base + (i < self._more) for i in range(self._pipelines)]
        parts: list[list[Kind]] = [[] for _ in sizes]
        lost = [0.0] * self._pipelines
        for kind in self._straggling:
            place = min((i for i, size in enumerate(sizes) if len(parts[i]) < size), key=lambda i: (lost[i], i))
            lost[place] += 1.0 - 1.0 / kind[0]
            parts[place].append(kind)
        return [(*part, *[self._whole] * (size - len(part))) for part, size in zip(parts, sizes, strict=True)]

    def _contents(self, merged: Sequence[Kind]) -> Contents:
        """Every content of a pipeline of `base` and of `base + 1` stages that holds the model."""
        kinds = sorted(set(merged), key=lambda kind: (-kind[0], kind[1]))
        most = Counter(merged)
        rates = np.array([*(rate for rate, _ in kinds), self._whole[0]])
        degrees = [*(degree for _, degree in kinds), self._whole[1]]
        found: list[tuple[Ints, Ints, Floats, Floats]] = []
        for size in {self._base, self._base + (self._more > 0)}:
            counts = np.zeros((1, 0), dtype=np.int64)
            for kind in kinds:
                taken = np.arange(most[kind] + 1)
                counts = np.column_stack([np.repeat(counts, len(taken), axis=0), np.tile(taken, len(counts))])
                counts = counts[counts.sum(axis=1) <= size]
            counts = counts[size - counts.sum(axis=1) <= self._total - len(merged)]
            place = (np.cumsum(counts, axis=1)[:, None, :] <= np.arange(size)[:, None]).sum(axis=2)
            room = np.full((len(degrees), size), self._n_layers)
            if self._limits is not None:
                room = np.array([self._limits([degree] * size) for degree in degrees])
            slowest = _slowest_stages(rates[place], room[place, np.arange(size)], self._n_layers)
            fits = np.isfinite(slowest)
            weights = (1.0 / rates[place]).sum(axis=1)
            found.append((counts[fits], np.full(int(fits.sum()), size), weights[fits], slowest[fits]))
        return Contents(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _reached(self, contents: Contents, merged: Sequence[Kind], target: float) -> Template | None:
        """A template whose objective is at most `target`."""
        kinds = sorted(set(merged), key=lambda kind: (-kind[0], kind[1]))
        all_of = Counter(merged)
        weight = sum(1.0 / rate for rate, _ in merged) + self._total - len(merged)
        allowed = target / self._n_layers * weight - self._micro_batches + EXACT * self._micro_batches
        takes = np.floor(target / contents.slowest * (1 + EXACT))
        waste = target / self._n_layers * contents.weights - takes
        usable = (waste <= allowed) & (takes >= (contents.sizes if self._stages_at_least else 1))
        order = np.flatnonzero(usable)[np.argsort(waste[usable], kind="stable")]
        none = contents.counts[order].sum(axis=1) == 0
        plain = {int(contents.sizes[row]): float(waste[row]) for row in order[none]}
        order = order[~none]
        most = np.array([all_of[kind] for kind in kinds], dtype=np.int64)
        strides = np.cumprod([1, *(most + 1)[:-1]])[: len(kinds)]
        keys = contents.counts @ strides
        leads = (contents.counts[order] > 0).argmax(axis=1) if kinds else order
        by_lead = [order[leads == lead] for lead in range(len(kinds))]
        level = _Level(
            left=np.array([most @ strides]), more=np.array([self._more]), slack=np.array([allowed]), parent=np.zeros(1, int),
            row=np.zeros(1, int),
        )  # fmt: skip
        levels = [level]
        for done in range(self._pipelines + 1):
            for state in np.flatnonzero(level.left == 0).tolist():
                more = int(level.more[state])
                rest = [self._base + 1] * more + [self._base] * (self._pipelines - done - more)
                if sum(plain.get(size, inf) for size in rest) <= level.slack[state]:
                    return self._template(contents, kinds, _rows(levels, state), rest)
            states = np.flatnonzero(level.left > 0)
            if not len(states) or done == self._pipelines:
                return None
            last, moved = done == self._pipelines - 1, list[tuple[Ints, Ints]]()
            for state in states.tolist():
                left = level.left[state] // strides % (most + 1)
                rows = by_lead[int((left > 0).argmax())]
                rows = rows[: int(np.searchsorted(waste[rows], level.slack[state], side="right"))]
                if last:
                    rows = rows[keys[rows] == level.left[state]]
                else:
                    rows = rows[: max(1, MOVES // len(states))]
                    rows = rows[(contents.counts[rows] <= left).all(axis=1)]
                longer, more = contents.sizes[rows] > self._base, int(level.more[state])
                rows = rows[np.where(longer, more > 0, self._pipelines - done > more)]
                moved.append((np.full(len(rows), state), rows))
            parents, rows = (np.concatenate(column) for column in zip(*moved, strict=True))
            level = _least_wasteful(
                _Level(
                    left=level.left[parents] - keys[rows],
                    more=level.more[parents] - (contents.sizes[rows] > self._base),
                    slack=level.slack[parents] - waste[rows],
                    parent=parents,
                    row=rows,
                )
            )
            levels.append(level)
        return None

    def _template(self, contents: Contents, kinds: Sequence[Kind], rows: Sequence[int], rest: Sequence[int]) -> Template:
        """Merged kinds become the groups that they stand for again, the slowest first."""
        own = {kind: list[Kind]() for kind in kinds}
        for real, kind in zip(self._straggling, _merged(self._straggling), strict=True):
            own[kind].append(real)
        template: Template = []
        for row in rows:
            part = [own[kind].pop(0) for kind, n in zip(kinds, contents.counts[row].tolist(), strict=True) for _ in range(n)]
            part.sort(key=lambda kind: (-kind[0], kind[1]))
            template.append((*part, *[self._whole] * (int(contents.sizes[row]) - len(part))))
        return [*template, *((self._whole,) * size for size in rest)]


class _Level(msgspec.Struct, frozen=True, eq=False):
    """States after some pipelines, arrays: the groups left as one number, longer pipelines left, waste allowed; whence."""

    left: Ints
    more: Ints
    slack: Floats
    parent: Ints
    row: Ints


def _least_wasteful(level: _Level) -> _Level:
    """Each state once, with the least waste; the best `WIDTH` of them."""
    order = np.lexsort((-level.slack, level.more, level.left))
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (np.diff(level.left[order]) != 0) | (np.diff(level.more[order]) != 0)
    kept = order[new]
    kept = kept[np.argsort(-level.slack[kept], kind="stable")][:WIDTH]
    return _Level(level.left[kept], level.more[kept], level.slack[kept], level.parent[kept], level.row[kept])


def _rows(levels: Sequence[_Level], state: int) -> list[int]:
    """The contents of the pipelines that led to a state of the last level, the first pipeline first."""
    rows: list[int] = []
    for level in reversed(levels[1:]):
        rows.insert(0, int(level.row[state]))
        state = int(level.parent[state])
    return rows


def slowest_stage(rates: Sequence[float], n_layers: int, limits: Sequence[int] | None = None) -> float:
    """ILP 1's optimum, ``min max y l`` with whole layers; inf when they do not fit.

    >>> slowest_stage([7.22, 7.22, 3.66, 1, 1, 1], 80)
    23.0
    """
    room = np.array([limits if limits is not None else [n_layers] * len(rates)])
    return float(_slowest_stages(np.array([rates], dtype=np.float64), room, n_layers)[0])


def _slowest_stages(rates: Floats, room: Ints, n_layers: int) -> Floats:
    """The same for many pipelines, [n, stages]: what all take in equal time, then layer by layer where it ends first."""
    even = n_layers / (1.0 / rates).sum(axis=1, keepdims=True)
    layers = np.minimum(np.floor(even / rates * (1 + 1e-12)), room).astype(np.int64)
    left = n_layers - layers.sum(axis=1)
    fits = room.sum(axis=1) >= n_layers
    rows = np.flatnonzero(fits & (left > 0))
    while len(rows):
        ends = np.where(layers[rows] < room[rows], (layers[rows] + 1) * rates[rows], np.inf)
        layers[rows, ends.argmin(axis=1)] += 1
        left[rows] -= 1
        rows = rows[left[rows] > 0]
    return np.asarray(np.where(fits, (layers * rates).max(axis=1), np.inf))


def _merged(straggling: Sequence[Kind]) -> list[Kind]:
    """The kind that each group counts as: its own, or a slower and no larger one where there would be too many contents."""
    groups = [[kind] for kind in sorted(set(straggling), key=lambda kind: (-kind[0], kind[1]))]
    counts = Counter(straggling)

    def contents() -> int:
        return prod(1 + sum(counts[kind] for kind in group) for group in groups)

    while contents() > CONTENTS:
        closest = min(range(len(groups) - 1), key=lambda i: groups[i][0][0] / groups[i + 1][-1][0])
        groups[closest : closest + 2] = [groups[closest] + groups[closest + 1]]
    representative = {kind: (group[0][0], min(degree for _, degree in group)) for group in groups for kind in group}
    return [representative[kind] for kind in straggling]
