"""Values of which only a range is known: what an iteration would have taken with a core for each rank lies between the time
that it took and the same without all the time that ranks had none, of which most may have passed beside other work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unskew.analytics.detector.residuals import Floats

Sample = tuple[int, float, float]
"""An iteration, and the logs of the least and of the most that it may have taken; mostly they are one."""
Samples = Sequence[Sample] | Floats
"""Several, also as an array (n, 3), which who asks for more than one thing of them makes once."""


def agreed(samples: Samples, near: float | None = None) -> Floats:
    """A value of each sample (n,): within its range the one nearest to what most of all agree on, and of several such values to
    `near`, or to the median of the most that they may be, which leaves the least to explain. Of known values, these.

    >>> known, vague = [(0, 1.0, 1.0), (1, 1.1, 1.1), (2, 0.9, 0.9)], [(3, 0.5, 1.3), (4, 0.6, 1.2)]
    >>> agreed(known).tolist(), agreed([*known, *vague]).tolist(), agreed(vague).tolist(), agreed(vague, 0.0).tolist()
    ([1.0, 1.1, 0.9], [1.0, 1.1, 0.9, 1.0, 1.0], [1.2, 1.2], [0.6, 0.6])
    """
    least, most = _ends(samples)
    if (least == most).all():
        return least
    n, ends = len(least), np.sort(np.concatenate([least, most]))
    middle = min(max(float(np.median(most)) if near is None else near, float(ends[n - 1])), float(ends[n]))
    return np.minimum(np.maximum(least, middle), most)


def within(samples: Samples, expected: float) -> Floats:
    """The value of each sample (n,) that is nearest to what is `expected`.

    >>> within([(0, 0.5, 1.3), (1, 0.5, 0.9), (2, 1.2, 1.3)], 1.0).tolist()
    [1.0, 0.9, 1.2]
    """
    least, most = _ends(samples)
    return np.minimum(np.maximum(least, expected), most)


def _ends(samples: Samples) -> tuple[Floats, Floats]:
    ends: Floats = np.asarray(samples, dtype=np.float64)
    return ends[:, 1], ends[:, 2]
