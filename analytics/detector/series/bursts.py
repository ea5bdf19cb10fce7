"""How often a series is long for a while by itself: its long iterations come one after another more often than by lot.

Kept are the last long iterations of the healthy past. Of those over a line, `again` is the share that another one follows; a
stretch of n iterations of which k are over it has begun as often as long ones did, and gone on each time with that chance. The
line is the one that the stretch itself is over, so that many small ones do not excuse a large one, nor lone spikes a run.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from scipy.special import betainc

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
        """How many stretches of `n` iterations, `slow` of them over `line`, are to be expected in a past like this one.

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
        goes_on = float(betainc(slow - 1, n - slow + 1, again)) if slow > 1 else 1.0
        return (1 + len(over) - repeats) * goes_on

    def lines(self, level: float) -> list[float]:
        """Levels above `level` of which half is over fewer and fewer of those kept."""
        return sorted(2 * excess + 1e-9 for _, excess in self.kept if 2 * excess >= level)
