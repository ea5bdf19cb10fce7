"""Where the later part of a slowness begins, when what came before it is too little to be named."""

from __future__ import annotations

from math import sqrt

import numpy as np

from unskew.analytics.detector.cusum import CusumLimits
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.series.noise import lone_spread, noise_of

LEAST_LEVEL, CLEAR_CHANGE = 4, 8.0
"""A level lasts so long, and differs by so many of its errors: neighbours of noise that are alike differ by less."""


def begins_later(excess: Floats, least: float) -> int:
    """The position from which on `excess` (n,), none nan, lies at another level: at least `least`, and more than twice that of
    what came before, which is less than `least`; 0 where there is none such.

    The levels are medians.

    >>> begins_later(np.array([0.3, 0.2, 0.3, 0.3, 1.8, 1.9, 1.8]), 0.34), begins_later(np.full(7, 0.3), 0.34)
    (4, 0)
    """
    if len(excess) < 2:
        return 0
    at = one_change(excess)
    low, high = float(np.median(excess[:at])), float(np.median(excess[at:]))
    return at if high >= least > low and high > 2 * low else 0


def fires_from(over: Floats, limits: CusumLimits) -> int | None:
    """The position from which on what a test of one series fired on, `over` (n,), lies at more than twice the level of what
    came before, which would not have fired by itself: a little that came first neither dates a slowdown nor hides it. 0 where
    it does not change so; None where what came after does not fire by itself yet."""
    at = one_change(over) if len(over) > 1 else 0
    gain, threshold = np.minimum(over - limits.slack, limits.cap), float(limits.threshold)
    low, high = (float(np.median(part)) if len(part) else 0.0 for part in (over[:at], over[at:]))
    if high < limits.slack or high <= 2 * low or gain[:at].sum() > threshold:
        return 0
    return at if gain[at:].sum() > threshold else None


def likeliest_onset(over: Floats, level: float) -> int:
    """The position from which on `over` (n,) most likely lies at `level`, and not at 0 as before: of Laplace noise, which makes
    one value speak for as much as `level` at most, however long it was. A test's sum leaves zero by noise that is above its
    slack, so it dates a slowness early that is much more than that.

    >>> likeliest_onset(np.array([0.1, 0.0, 0.06, 0.3, 0.2, 0.3]), 0.25)
    3
    """
    speaks = np.clip(2 * over - level, -level, level)
    return int(np.argmax(np.cumsum(speaks[::-1])[::-1]))


def without_changes(values: Floats) -> Floats:
    """`values` (n,), none nan, each less the median of its level, where levels clearly change: what is left is noise.

    >>> without_changes(np.array([1.0, 1.1, 0.9, 1.0, 9.0, 9.1, 8.9, 9.0])).round(1).tolist()
    [0.0, 0.1, -0.1, 0.0, 0.0, 0.1, -0.1, 0.0]
    """
    n, at = len(values), one_change(values) if len(values) > 1 else 0
    as_one = values - np.median(values)
    if not LEAST_LEVEL <= at <= n - LEAST_LEVEL:
        return as_one
    before, after = values[:at], values[at:]
    clear = abs(float(np.median(after) - np.median(before))) / (CLEAR_CHANGE * sqrt(1 / at + 1 / (n - at)))
    if clear <= lone_spread(values):
        return as_one
    apart = np.concatenate([without_changes(before), without_changes(after)])
    return apart if clear > noise_of(apart, 0.0).sigma else as_one


def one_change(values: Floats) -> int:
    """Where `values` (n,), two or more, none nan, change their mean, if they do once: the position that explains most of the
    squares.

    >>> one_change(np.array([1.0, 1.1, 0.9, 2.0, 2.1]))
    3
    """
    n = len(values)
    before = np.arange(1, n)
    sums = np.cumsum(values)
    apart = sums[:-1] / before - (sums[-1] - sums[:-1]) / (n - before)
    return 1 + int(np.argmax(before * (n - before) * apart**2))
