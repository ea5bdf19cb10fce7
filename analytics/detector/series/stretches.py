"""The stretches of iterations in which a series lies higher: against what it is expected to be, or against the rest of itself.

A stretch is named when its mean is higher than independent values would make that of any stretch in all but `FALSE_ALARMS` of
healthy tables: a third of that is for all iterations, a third for stretches from one on to the end or from the beginning on, a
third for any others. Of two that are, the one wins whose edges pay for themselves (BIC). The others are sought beside it, the
healthy gaps within it: slow twice is two episodes. Each value counts up to a bound, so that fewer than `least` never suffice.
Of several readings (a rank's own times, and those over its peers') the one that says least decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log, sqrt

import msgspec
import numpy as np
from scipy.special import stdtrit

from unskew.analytics.detector.residuals import Flags, Floats, Ints
from unskew.analytics.detector.series.levels import begins_later, without_changes
from unskew.analytics.detector.series.noise import noise_of

FALSE_ALARMS = 1e-3
MOST_EDGES = 256
"""Longer series are looked at in so many blocks: every stretch is tried, and their number grows squared."""
MAD_EFFICIENCY = 0.37
"""A spread from median distances is as uncertain as one of so much less data, normal noise."""
PART, STEADIER = 32, 0.25
"""The noise is that of a part of so many iterations which is noisier than so much of them."""
LEAST_REST = 3
"""Against the rest of itself: there is a third as much of that as of the stretch, or more."""
SURE_SIGMAS, MEDIAN_ERROR = 2.0, 1.2533


class Stretch(msgspec.Struct, frozen=True):
    """[begin, end); `over`: its score over what is named."""

    begin: int
    end: int
    over: float


class Stretches(msgspec.Struct, frozen=True):
    """`found`, in the order of time; `wider` [reading]: how many times the noise as it was given values outside of them vary,
    1 or more. A spread from median distances does not see what one value in five does."""

    found: tuple[Stretch, ...]
    wider: Floats


class StretchTest(msgspec.Struct, frozen=True):
    """`limits`: the score to be named, by how many edges of the stretch are free (none: all iterations); `least`: iterations
    that suffice; `against_rest`: what is healthy is not known beforehand."""

    limits: tuple[float, float, float]
    least: int
    against_rest: bool

    @classmethod
    def of(cls, n: int, n_series: int, *, least: int, against_rest: bool) -> StretchTest:
        """Over `n_series` series of n values."""
        edges = min(n, MOST_EDGES)
        tried = n_series * np.array([1, 2 * edges, edges * (edges + 1) / 2])
        freedom = max(MAD_EFFICIENCY * n_series * (n - 1), 1.0)
        first, second, third = (-stdtrit(freedom, FALSE_ALARMS / 3 / tried)).tolist()
        return cls((first, second, third), least, against_rest)

    def smallest(self, n: int, sigma: float, least_level: float) -> float:
        """The least level of a stretch that is named in 19 of 20 tables: one that lasts a third of n iterations, and twice what
        suffices, where as much is healthy."""
        lasts = min(max(2 * self.least, n / 3), n)
        error = sigma * sqrt(1 / lasts + (LEAST_REST / n if self.against_rest else 0.0))
        return max(least_level + SURE_SIGMAS * MEDIAN_ERROR * error, (self.limits[2] + SURE_SIGMAS) * error)


def steady_sigma(values: Floats) -> float:
    """The noise of the steadier parts: a level that changes is noise of the parts in which it does."""
    known = values[~np.isnan(values)]
    if not len(known):
        return 0.0
    parts = np.array_split(known, min(max(len(known) // PART, 2), len(known)))
    return float(np.quantile([noise_of(without_changes(part), 0.0).sigma for part in parts], STEADIER, method="lower"))


def stretches_of(
    readings: Floats, sigma: Floats, test: StretchTest, least_level: float = 0.0, apart: Sequence[Stretch] = ()
) -> Stretches:
    """Those that are named; `readings` [reading, iteration] (nan = not seen), `sigma` [reading] of one value. One that begins
    with less than `least_level` and later becomes more counts from there on. How values vary in `apart` is not their own."""
    series = _Series(readings, sigma, test)
    found: list[Stretch] = []
    while (one := series.strongest(found)) is not None:
        found.append(one)
    together: list[Stretch] = []
    for one in sorted(found, key=lambda one: one.begin):
        last = together[-1] if together else None
        if last is not None and one.begin - last.end < test.least:
            together[-1] = Stretch(last.begin, one.end, max(last.over, one.over))
        else:
            together.append(one)
    parts = [series.from_level(part, least_level) for one in together for part in series.without_gaps(one)]
    wider = series.wider_by([*parts, *apart])
    return Stretches(tuple(one for one in parts if one.over >= wider.max(initial=1.0)), wider)


class _Series:
    """Sums over any stretch, by its edges."""

    def __init__(self, readings: Floats, sigma: Floats, test: StretchTest) -> None:
        self.test, self.sigma, self.n = test, sigma, readings.shape[1]
        seen: Flags = np.asarray(~np.isnan(readings).any(axis=0))
        most = (test.limits[2] * sigma / sqrt(test.least - 0.5))[:, None]
        middle = np.median(readings[:, seen], axis=1)[:, None] if test.against_rest and seen.any() else 0.0
        self.seen, self.least = seen, np.min(readings - middle, axis=0)
        self.bounded = np.where(seen, np.clip(readings - middle, -most, most), 0.0)
        bounded = self.bounded
        self.sums = np.concatenate([np.zeros((len(sigma), 1)), np.cumsum(bounded, axis=1)], axis=1)
        self.counts = np.concatenate([[0], np.cumsum(seen)])
        self.edges = np.linspace(0, self.n, min(self.n, MOST_EDGES) + 1).round().astype(int)

    def strongest(self, found: list[Stretch]) -> Stretch | None:
        """The next stretch, beside those that were found."""
        begin, end = (self.edges[side] for side in np.triu_indices(len(self.edges), k=1))
        overlaps = np.zeros(len(begin), dtype=bool)
        for one in found:
            overlaps |= (begin < one.end) & (end > one.begin)
        begin, end = begin[~overlaps], end[~overlaps]
        if not len(begin):
            return None
        mine = [self._of(one.begin, one.end) for one in found]
        n_rest = int(self.counts[-1]) - sum(int(n) for n, _ in mine)
        rest = self.sums[:, -1] - np.sum([of for _, of in mine], axis=0) if mine else self.sums[:, -1]
        score = self._score(begin, end, n_rest, rest)
        free = (begin > 0).astype(int) + (end < self.n)
        over = score / np.array(self.test.limits)[free]
        fit = np.where(over >= 1, score**2 - 2 * free * log(max(self.n, 2)), -inf)
        at = int(np.argmax(fit))
        return Stretch(int(begin[at]), int(end[at]), float(over[at])) if over[at] >= 1 else None

    def without_gaps(self, one: Stretch) -> list[Stretch]:
        """The stretch, in parts where it is healthy again for a while."""
        inner = self.edges[(self.edges >= one.begin + self.test.least) & (self.edges <= one.end - self.test.least)]
        begin, end = (inner[side] for side in np.triu_indices(len(inner), k=self.test.least))
        if not len(begin):
            return [one]
        n, total = self._of(one.begin, one.end)
        gap_n, gap = self._of(begin, end)
        level = (total[:, None] - gap) / np.maximum(n - gap_n, 1)
        healthy = 0.0
        if self.test.against_rest:
            healthy = ((self.sums[:, -1] - total) / np.maximum(self.counts[-1] - n, 1))[:, None]
        below = level - gap / np.maximum(gap_n, 1)
        error = self.sigma[:, None] * np.sqrt(1 / np.maximum(gap_n, 1) + 1 / np.maximum(n - gap_n, 1))
        score = np.where((below > (level - healthy) / 2) & (gap_n > 0), below / error, -inf).min(axis=0)
        at = int(np.argmax(score))
        if score[at] < self.test.limits[2]:
            return [one]
        parts = (Stretch(one.begin, int(begin[at]), one.over), Stretch(int(end[at]), one.end, one.over))
        return [whole for part in parts for whole in self.without_gaps(part)]

    def from_level(self, one: Stretch, least: float) -> Stretch:
        """The stretch, from where it is at another level that is named."""
        seen = one.begin + np.flatnonzero(self.seen[one.begin : one.end])
        later = begins_later(self.least[seen], least)
        if not later:
            return one
        begin = int(seen[later])
        n, total = self._of(begin, one.end)
        return Stretch(begin, one.end, float((total / (self.sigma * sqrt(n))).min()) / self.test.limits[2])

    def wider_by(self, found: Sequence[Stretch]) -> Floats:
        """By what is not in `found`: its deviation, or that of the longer values alone where this is less."""
        rest = np.array(self.seen)
        for one in found:
            rest[one.begin : one.end] = False
        if rest.sum() < self.test.least:
            return np.ones(len(self.sigma))
        values = self.bounded[:, rest]
        up = np.maximum(values - np.median(values, axis=1, keepdims=True), 0.0)
        least = np.minimum(np.sqrt(2 * (up**2).mean(axis=1)), values.std(axis=1))
        return np.asarray(np.maximum(least / self.sigma, 1.0))

    def _of(self, begin: Ints | int, end: Ints | int) -> tuple[Ints, Floats]:
        """How many were seen in [begin, end), and the sums [reading, ...] of these."""
        return self.counts[end] - self.counts[begin], self.sums[:, end] - self.sums[:, begin]

    def _score(self, begin: Ints, end: Ints, n_rest: int, rest: Floats) -> Floats:
        n, total = self._of(begin, end)
        known = np.maximum(n, 1)
        if not self.test.against_rest:
            return np.where(n > 0, (total / (self.sigma[:, None] * np.sqrt(known))).min(axis=0), -inf)
        others = n_rest - n
        enough = (n > 0) & (others >= np.maximum(self.test.least, n / LEAST_REST))
        others = np.maximum(others, 1)
        higher = total / known - (rest[:, None] - total) / others
        return np.where(enough, (higher / (self.sigma[:, None] * np.sqrt(1 / known + 1 / others))).min(axis=0), -inf)
