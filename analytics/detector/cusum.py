"""The sequential test: a two-sided CUSUM around the estimated level of each unit (a device's kind of work, a link, a job).

Source: Page 1954. Each iteration adds ``min(excess - level - slack, cap)`` to a sum that never falls below zero; a sum over
`threshold` is a change, and the iteration after the sum's last zero is its onset. The cap bounds what one iteration can
contribute, so that it takes `least_iterations` of them, however bad: no lone spike fires. Upwards counts the least of the
excesses (against prediction, data-parallel peers, pipeline peers), downwards the most: an excuse always counts for the
status quo.

The threshold follows from a budget of false alarms (Siegmund 1985, eq. 2.57: the mean time between false alarms of a
CUSUM on independent normal excesses of standard deviation sigma): with k = slack / sigma and b = threshold / sigma + 1.166,

    iterations between false alarms = (exp(2 k b) - 2 k b - 1) / (2 k^2)

That holds of normal noise. What a series itself has shown tells more (Lundberg's inequality, in Asmussen and Albrecher,
Ruin Probabilities, 2010): sums of excesses x less the slack pass b about as seldom as exp(-theta b), where the mean of
exp(theta x) is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log
from statistics import NormalDist

import msgspec
import numpy as np

from unskew.analytics.detector.residuals import Floats, Ints

OVERSHOOT = 1.166  # Siegmund's correction for the step over the threshold, in sigmas
MOST_RAISED = 3.0  # times the threshold: more than that no excesses of the past raise it
_HALVINGS = 12
_NORMAL = NormalDist()


class CusumLimits(msgspec.Struct, frozen=True):
    """The test's constants per kind, each broadcastable to the units: `slack` and `threshold` in logs of time."""

    slack: Floats
    threshold: Floats
    least_iterations: int

    @property
    def cap(self) -> Floats:
        """Half a step short of `threshold / (least_iterations - 1)`: one iteration fewer never reaches the threshold."""
        return np.asarray(self.threshold / (self.least_iterations - 0.5))


class CusumSide(msgspec.Struct, frozen=True):
    """One side of the tests of many units: the sums, and the iterations at which each was last zero."""

    total: Floats
    zero_at: Ints

    @staticmethod
    def fresh(shape: tuple[int, ...], iteration: int) -> CusumSide:
        return CusumSide(np.zeros(shape), np.full(shape, iteration, dtype=np.int64))

    def advance(self, iteration: int, gain: Floats) -> CusumSide:
        """One iteration further; nan = not seen."""
        total = np.where(np.isnan(gain), self.total, self.total + gain)
        fell = total <= 0
        return CusumSide(np.where(fell, 0.0, total), np.where(fell, iteration, self.zero_at))


class CusumSums(msgspec.Struct, frozen=True):
    """Both sides."""

    up: CusumSide
    down: CusumSide

    @staticmethod
    def fresh(shape: tuple[int, ...], iteration: int) -> CusumSums:
        side = CusumSide.fresh(shape, iteration)
        return CusumSums(side, side)

    def each(self, change: Callable[[CusumSide], CusumSide]) -> CusumSums:
        """Both sides changed alike."""
        return CusumSums(change(self.up), change(self.down))

    def advance(self, iteration: int, least: Floats, most: Floats, limits: CusumLimits) -> CusumSums:
        """One iteration further; `least` and `most` are what is left of the excess over the estimated level, nan = not seen."""
        up, down = (np.minimum(over - limits.slack, limits.cap) for over in (least, -most))
        return CusumSums(self.up.advance(iteration, up), self.down.advance(iteration, down))


@lru_cache(maxsize=4_096)  # noise is rounded, so that few are asked for, each by every rank's tests
def threshold(sigma: float, slack: float, iterations: float) -> float:
    """The threshold at which healthy noise fires once in so many iterations: the formula above solved, at least sigma."""
    k = slack / sigma
    target = max(2 * k * k * iterations, 2.0)
    x = log(target)
    for _ in range(20):
        x = log(target + x + 1)
    return sigma * max(x / (2 * k) - OVERSHOOT, 1.0)


def raised(least: float, over: Floats, cap: float, iterations: float) -> float:
    """The threshold `least`, or more where sums of `over`, what healthy excesses were above the slack, would pass it more often
    than once in so many iterations. Each counts at most `cap`."""
    bounded, rarity = np.minimum(over, cap), log(iterations)

    def too_often(theta: float) -> bool:
        return float(np.add.reduce(np.exp(theta * bounded))) / len(bounded) > 1  # the mean, in a third of the time

    rare, often = rarity / (MOST_RAISED * least), rarity / least
    if not too_often(often):
        return least
    for _ in range(_HALVINGS):
        theta = (rare + often) / 2
        rare, often = (rare, theta) if too_often(theta) else (theta, often)
    return rarity / rare


def rise(sigma: float, limits: CusumLimits, n: int) -> float:
    """By how much the mean of normal excesses over the slack has to be above 0 for the sum of `n`, each counted up to the cap,
    to reach the threshold: E min(X, c) = c - sigma (f(z) + z F(z)), z = (c - mean) / sigma."""
    cap, least = float(limits.cap), float(limits.threshold) / n
    low, high = 0.0, cap + 4 * sigma
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        z = (cap - middle) / sigma
        enough = cap - sigma * (_NORMAL.pdf(z) + z * _NORMAL.cdf(z)) >= least
        low, high = (low, middle) if enough else (middle, high)
    return high
