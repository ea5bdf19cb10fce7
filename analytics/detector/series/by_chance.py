"""Whether a stretch in which many values are long comes by chance where single values are often long.

Whether a value is long depends on the two before it: long ones go on, come back after one that is not, and begin anew, each as
often as in the rest of the values. What a stretch does more often than that tells that it is another state. So three long
ones in a row, once, do not excuse twelve; where three in five are long, they do.
"""

from __future__ import annotations

import numpy as np
from scipy.special import xlogy

from unskew.analytics.detector.residuals import Flags, Floats, Ints

LINES = (0.0, 0.25, 0.5, 0.75)
"""So much of the stretch is below what counts as long: of a slow rank's values the shortest may be as long as others elsewhere,
and the longest are few."""
GOES_ON, COMES_BACK, BEGINS = range(3)


def chance_beside(stretch: Floats, rest: Floats) -> float:
    """How many stretches like `stretch` (n,) are to be expected in `rest` [iteration, series], of any length that tells as much
    (Chernoff's bound: the stretch was sought), by the line that tells most; nan = not seen, or not of it.

    >>> rare, often = np.zeros((2, 400, 1))
    >>> rare[[20, 21, 140, 260, 261, 262]] = often[::2] = often[::3] = 1.0
    >>> dense = np.array([1.0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1])
    >>> [f"{chance_beside(dense, past):.0e}" for past in (rare, often)]
    ['3e-04', '4e+00']
    """
    seen, known = stretch[~np.isnan(stretch)], ~np.isnan(rest)
    if not len(seen):
        return 1.0
    lines = np.unique(np.quantile(seen, LINES, method="lower"))
    return len(lines) * min(_chance(seen >= line, known & (rest >= line), known) for line in lines)


def _chance(stretch: Flags, over: Flags, known: Flags) -> float:
    """By what is `over` one line."""
    n, long = _counted(over, known)
    often = (1 + long.sum()) / (n.sum() + 2)
    rate = (long + often) / (n + 1)
    rate[:BEGINS] = np.maximum(rate[:BEGINS], often)
    begun = stretch[int(np.argmax(stretch)) :][:, None]
    tried, went = _counted(begun, np.arange(len(begun))[:, None] > 0)
    share = went / np.maximum(tried, 1)
    evidence = xlogy(went, share / rate) + xlogy(tried - went, (1 - share) / (1 - rate))
    return float((1 + long[COMES_BACK] + long[BEGINS]) * np.exp(-evidence[share > rate].sum()))


def _counted(over: Flags, known: Flags) -> tuple[Ints, Ints]:
    """[GOES_ON, COMES_BACK, BEGINS]: how often each could be, and was."""
    before = np.concatenate([np.zeros((2, over.shape[1]), dtype=bool), over])
    state = np.where(before[1:-1], GOES_ON, np.where(before[:-2], COMES_BACK, BEGINS))
    return np.bincount(state[known], minlength=3), np.bincount(state[known & over], minlength=3)
