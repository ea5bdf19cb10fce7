"""How far the pace of a job wanders: how surely what iterations took tells what later ones will take.

The mean of many independent values is sure; a pace that rises and falls slowly is not, however many iterations are known.
Kept is what blocks of iterations took. Neighbouring groups of 1, 2, 4, ... blocks are compared (the Allan variance, Allan
1966), less what their noise alone makes of it: noise fades with the length of the groups, and wandering stays or grows. What
all differ by is a trend, which goes on and is no matter of chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import msgspec
import numpy as np
from scipy.special import ndtr, stdtrit

from unskew.analytics.detector.residuals import Floats

BLOCK, MOST = 12, 64
LONGEST = 8  # blocks in a group: as long as the reference
LEAST_PAIRS = 2
ERRORS = 2.0  # as surely as twice the error of normal noise; of an error that few pairs tell, more times (Student's t)


class Paces(msgspec.Struct, frozen=True):
    """`kept`: the medians (log) of the last `MOST` blocks of healthy iterations; `block`: the part of the next one."""

    kept: tuple[float, ...] = ()
    block: tuple[float, ...] = ()

    def learned(self, logs: Iterable[float]) -> Paces:
        """With more healthy iterations."""
        kept, block = self.kept, (*self.block, *logs)
        while len(block) >= BLOCK:
            kept, block = (*kept[1 - MOST :], float(np.median(block[:BLOCK]))), block[BLOCK:]
        return Paces(kept, block)

    def wandered(self, spread: float) -> float:
        """By how much the pace of as many later iterations may be another; `spread`: the error of a median of n, times the
        root of n.

        >>> even, rises = (Paces().learned(slope * i for i in range(240)) for slope in (0.0, 0.001))
        >>> even.wandered(0.01), round(rises.wandered(0.01), 2)
        (0.0, 0.05)
        """
        paces, most, width = np.array(self.kept), 0.0, 1
        while width <= LONGEST and (pairs := len(paces) / width - 1) >= LEAST_PAIRS:
            apart = _means(paces, width)[width:] - _means(paces, width)[:-width]
            by_noise = 2 * spread**2 / (BLOCK * width)
            trend = abs(float(np.mean(apart)))
            beyond = sqrt(max(float(np.var(apart)) - by_noise, 0.0))
            most, width = max(most, trend + float(stdtrit(pairs, ndtr(ERRORS))) * beyond), 2 * width
        return most


def _means(values: Floats, width: int) -> Floats:
    """Of each `width` neighbours."""
    sums = np.cumsum([0.0, *values])
    return np.asarray((sums[width:] - sums[:-width]) / width)
