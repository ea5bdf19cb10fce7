"""The pace and the noise of a series in which neighbours are no independent witnesses."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec
import numpy as np

from unskew.analytics.detector.residuals import Floats

BOUND = 3.0  # spreads; what is farther off counts as that far, so that no spike decides how alike neighbours are
MOST_ALIKE = 0.9


class SeriesNoise(msgspec.Struct, frozen=True):
    """`middle`: the median. `sigma`: of values that were independent and would make sums vary as much as these do."""

    middle: float
    sigma: float


def noise_of(values: Sequence[float] | Floats, floor: float) -> SeriesNoise:
    """Of a few values or more; robust against just under half of them. Spread by the median distance from the median, at least
    `floor`, times ``sqrt((1 + r) / (1 - r))``: sums of values with lag-1 autocorrelation r vary by so much more.

    Few values look alike by chance: their spread counts ``1 + 3 / n`` times, and r is raised by twice what its estimate falls
    short of on average, ``(1 + 4 r) / n`` (Kendall 1954).
    """
    series, n = np.asarray(values), len(values)
    ordered = np.sort(series)
    middle = float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    away = series - middle
    far = np.sort(np.abs(away))
    spread = max(1.4826 * (1 + 3 / n) * float(far[(n - 1) // 2] + far[n // 2]) / 2, floor)
    bounded = np.clip(away, -BOUND * spread, BOUND * spread)
    square = float(bounded @ bounded)
    r = float(bounded[1:] @ bounded[:-1]) / square if square > 0 else 0.0
    r = min(max(r + 2 * (1 + 4 * r) / n, 0.0), MOST_ALIKE)
    return SeriesNoise(middle, spread * sqrt((1 + r) / (1 - r)))


def lone_spread(values: Floats) -> float:
    """What a value differs from its neighbours by, as a standard deviation: noise without what rises and falls slowly."""
    return 1.4826 * (1 + 3 / len(values)) * float(np.median(np.abs(np.diff(values)))) / sqrt(2)
