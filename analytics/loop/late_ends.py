"""By how much the end of iterations is longer of late than the fitted one: it is the machine's, and moves with what else the
machine does."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, median

import msgspec

END_OVER, LEAST_ENDS = 8, 4
"""So many iterations at most and at least tell how their end differs from the fitted one."""

AGAIN_OVER, AROUND = 20, END_OVER // 2
"""So many tell what comes again now and then: checkpoints come every ten, and what came once may not come again, so what comes
more rarely than twice in so many is not seen. Each is compared with so many before and behind it."""


ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Of n normal numbers, times their median absolute deviation over the root of n. A level counts for what it is without its
error (James and Stein's estimator, its positive part): on two cores that four ranks share iterations differ by a tenth of
their time, and the median of eight is off by as much as most levels move."""


class LateEnds(msgspec.Struct, frozen=True):
    """`rows`: the last iterations in which nobody was suspected, and by how much (us) each took longer than predicted."""

    rows: tuple[tuple[int, float], ...] = ()

    def add(self, iteration: int, more_us: float) -> LateEnds:
        """With one more."""
        return LateEnds((*self.rows, (iteration, more_us))[-(AGAIN_OVER + AROUND) :])

    def before(self, iteration: int) -> LateEnds:
        """Those before this one."""
        return LateEnds(tuple(row for row in self.rows if row[0] < iteration))

    @property
    def longer_us(self) -> float:
        """Their level of late, as far as it is certain, and what comes again."""
        if len(self.rows) < LEAST_ENDS:
            return 0.0
        last_us = [us for _, us in self.rows[-END_OVER:]]
        level_us = median(last_us)
        error_us = ERROR_OF_MEDIAN * median(abs(us - level_us) for us in last_us) / sqrt(len(last_us))
        certain = max(1.0 - (error_us / level_us) ** 2, 0.0) if level_us else 0.0
        return certain * level_us + self.again_us

    @property
    def again_us(self) -> float:
        """What is in the mean of iterations and in no median: where some take longer than those around them again and again,
        as after checkpoints. A level that moves is none of these."""
        if len(self.rows) < LEAST_ENDS:
            return 0.0
        more_us = [us for _, us in self.rows]
        over_us = [us - median(more_us[max(at - AROUND, 0) : at + AROUND + 1]) for at, us in enumerate(more_us)]
        _, least_us, *others_us, most_us, _ = sorted(over_us[-AGAIN_OVER:])
        return max(fmean([least_us, least_us, *others_us, most_us, most_us]), 0.0)
