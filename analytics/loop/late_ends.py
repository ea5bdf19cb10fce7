"""By how much the end of iterations is longer of late than the fitted one: it is the machine's, and moves with what else the
machine does."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.predictor.retraining import IterationSample

END_OVER, LEAST_ENDS = 8, 4
"""So many iterations at most and at least tell how their end differs from the fitted one."""

AGAIN_OVER, AROUND = 20, END_OVER // 2
"""So many tell what comes again now and then: checkpoints come every ten, and what came once may not come again, so what comes
more rarely than twice in so many is not seen. Each is compared with so many before and behind it."""


class LateEnds(msgspec.Struct, frozen=True):
    """`rows`: the last iterations in which nobody was suspected, and by how much (us) each took longer than predicted, as
    the ranks of the fitted end would have (`CostModel.crowding`)."""

    rows: tuple[tuple[int, float], ...] = ()

    def add(self, iteration: int, more_us: float) -> LateEnds:
        """With one more."""
        return LateEnds((*self.rows, (iteration, more_us))[-(AGAIN_OVER + AROUND) :])

    def before(self, iteration: int) -> LateEnds:
        """Those before this one."""
        return LateEnds(tuple(row for row in self.rows if row[0] < iteration))

    def by(self, cost: CostModel, seen: Iterable[IterationSample]) -> LateEnds:
        """By another predictor, those that are still `seen`: what comes again now and then is no news to be waited for."""
        known = {one.committed.iteration: one for one in seen}
        rows = [(at, known[at]) for at, _ in self.rows if at in known]
        more_us = (one.committed.measured_us - one.predicted_by(cost) for _, one in rows)
        return LateEnds(tuple((at, us / cost.crowding(one.plan)) for (at, one), us in zip(rows, more_us, strict=True)))

    @property
    def longer_us(self) -> float:
        """Their level of late, and what comes again."""
        if len(self.rows) < LEAST_ENDS:
            return 0.0
        return median(us for _, us in self.rows[-END_OVER:]) + self.again_us

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
