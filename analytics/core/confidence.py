"""How sure a mean over neighbouring iterations is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean

from scipy.stats import t as student


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of two values or more: Student's t on a reduced number of values.

    Neighbours in time are no independent witnesses: n counts as ``n (1 - r) / (1 + r)``, r = lag-1 autocorrelation in [0, 0.9],
    its estimate raised by what it falls short of on average, ``(1 + 4 r) / n`` (Kendall 1954).
    """
    n, mean = len(values), fmean(values)
    deviation = [value - mean for value in values]
    square = sum(d * d for d in deviation)
    if square == 0.0:
        return mean, mean
    estimate = sum(a * b for a, b in pairwise(deviation)) / square
    correlation = min(max(estimate + (1 + 4 * estimate) / n, 0.0), 0.9)
    effective = max(2.0, n * (1 - correlation) / (1 + correlation))
    half = float(student.ppf(0.975, effective - 1)) * sqrt(square / (n - 1) / effective)
    return mean - half, mean + half
