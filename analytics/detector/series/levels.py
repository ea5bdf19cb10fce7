"""Where the later part of a slowness begins, when what came before it is too little to be named."""

from __future__ import annotations

import numpy as np

from unskew.analytics.detector.residuals import Floats


def begins_later(excess: Floats, least: float) -> int:
    """The position from which on `excess` (n,), none nan, lies at another level: at least `least`, and more than twice that of
    what came before, which is less than `least`; 0 where there is none such.

    Of all positions the one that explains most of the squares (one change of the mean); the levels are medians.

    >>> begins_later(np.array([0.3, 0.2, 0.3, 0.3, 1.8, 1.9, 1.8]), 0.34), begins_later(np.full(7, 0.3), 0.34)
    (4, 0)
    """
    n = len(excess)
    if n < 2:
        return 0
    before = np.arange(1, n)
    sums = np.cumsum(excess)
    apart = sums[:-1] / before - (sums[-1] - sums[:-1]) / (n - before)
    at = 1 + int(np.argmax(before * (n - before) * apart**2))
    low, high = float(np.median(excess[:at])), float(np.median(excess[at:]))
    return at if high >= least > low and high > 2 * low else 0
