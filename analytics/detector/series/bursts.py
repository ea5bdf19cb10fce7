"""How often a series is long for a while by itself: its long iterations come one after another more often than by lot.

Kept are the last long iterations of the healthy past. Of those over a line, `again` is the share that another one follows; a
stretch of n iterations of which k are over it has begun as often as long ones did, and gone on each time with that chance. The
line is the one that the stretch itself is over, so that many small ones do not excuse a large one, nor lone spikes a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import msgspec
import numpy as np

from unskew.analytics.detector.residuals import Floats

MOST = 128


class LongIterations(msgspec.Struct, frozen=True):
    """`kept`: (iteration, log of the excess), the last `MOST`; `known`: how many iterations they are among."""

    kept: tuple[tuple[int, float], ...] = ()
    known: int = 0

    def learned(self, seen: Iterable[tuple[int, float]], least: float) -> LongIterations:
        """With more of the past: (iteration, excess)."""
        rows = tuple(seen)
        kept = (*self.kept, *(one for one in rows if one[1] > least))
        known = self.known + len(rows)
        if len(kept) > MOST:
            known, kept = round(known * MOST / len(kept)), kept[-MOST:]
        return LongIterations(kept, known)

    def chance(self, n: int, slow: int, line: float) -> float:
        """How many stretches of `n` iterations, `slow` of them over `line`, are to be expected in a past like this one, of any
        length that tells as much (Chernoff's bound: the stretch was sought).

        >>> alone = LongIterations(tuple((at, 0.5) for at in range(0, 400, 20)), 400)
        >>> pairs = LongIterations(tuple((at + i, 0.5) for at in range(0, 400, 40) for i in (0, 1)), 400)
        >>> [f"{one.chance(4, 4, 0.2):.1g}" for one in (LongIterations((), 400), alone, pairs)]
        ['2e-08', '0.003', '1']
        """
        if not slow:
            return 1.0
        over = [iteration for iteration, excess in self.kept if excess > line]
        repeats = int(np.sum(np.diff(over) == 1))
        often = (1 + len(over)) / (self.known + 2)
        again = max((repeats + often) / (len(over) + 1), often)
        share = (slow - 1) / max(n - 1, 1)
        distance = share * log(share / again) if share > again else 0.0
        if again < share < 1:
            distance += (1 - share) * log((1 - share) / (1 - again))
        return (1 + len(over) - repeats) * exp(-(n - 1) * distance)

    def lines(self, level: float) -> list[float]:
        """Levels above `level` of which half is over fewer and fewer of those kept."""
        return sorted(2 * excess + 1e-9 for _, excess in self.kept if 2 * excess >= level)


def chance_beside(values: Floats, rest: Floats, line: float) -> float:
    """How many stretches like `values` (n,) are to be expected in `rest` [iteration, series], by what lies over `line`; nan =
    not seen, or not of it."""
    series, at = np.nonzero(~np.isnan(rest.T))
    places = at + series * 2 * len(rest)  # the last of one series and the first of another are no neighbours
    past = LongIterations(tuple((int(place), 1.0) for place in places[rest.T[series, at] > line]), len(at))
    seen = values[~np.isnan(values)]
    return past.chance(len(seen), int((seen > line).sum()), 0.0)
