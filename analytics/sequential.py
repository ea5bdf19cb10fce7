"""The sequential test of one (rank, kind of work): a two-sided CUSUM around the level believed of the device.

Source: Page 1954. Each iteration adds ``clip(excess / sigma, winsor) - slack`` to a sum that never falls below zero; the sum
over `threshold` is a change, and the iteration after the sum's last zero is its onset. The clip bounds what one iteration can
say, so no single spike fires, however large: it takes at least ``threshold / (winsor - slack)`` iterations. Upwards counts the
least of the excesses (against prediction, peers, mates), downwards the most: an excuse always counts for the status quo.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from unskew.analytics.residuals import Excess


class Test(msgspec.Struct, frozen=True, gc=False):
    """One side of the test; `zero_at` is the iteration at which the sum was last zero."""

    __test__ = False  # not a test class of pytest

    sum: float
    zero_at: int

    def advance(self, iteration: int, z: float, slack: float, winsor: float) -> Test:
        total = self.sum + min(z, winsor) - slack
        return Test(total, self.zero_at) if total > 0 else Test(0.0, iteration)


class Seen(msgspec.Struct, frozen=True, gc=False):
    """The excess of one iteration over the healthy baseline; what is believed of the rank itself is not subtracted."""

    iteration: int
    excess: Excess


class Track(msgspec.Struct, frozen=True):
    """All that is remembered of one (rank, kind).

    `baseline` is what the healthy device shows by itself (its part, the model's misfit), learned slowly and never above
    a bound; `level` is ``-log(believed speed)``; `recent` the last iterations, oldest first.
    """

    up: Test
    down: Test
    baseline: float = 0.0
    level: float = 0.0
    recent: tuple[Seen, ...] = ()

    @staticmethod
    def fresh(iteration: int) -> Track:
        return Track(Test(0.0, iteration), Test(0.0, iteration))

    def restarted(self, iteration: int) -> Track:
        """The test begins anew; what was learned stays."""
        return msgspec.structs.replace(self, up=Test(0.0, iteration), down=Test(0.0, iteration))

    def advance(self, seen: Seen, sigma: float, *, slack: float, winsor: float, window: int) -> Track:
        """One iteration further; `sigma` scales the excess, sums are in sigmas."""
        above = (seen.excess.least - self.level) / sigma
        below = (self.level - seen.excess.most) / sigma
        return msgspec.structs.replace(
            self,
            up=self.up.advance(seen.iteration, above, slack, winsor),
            down=self.down.advance(seen.iteration, below, slack, winsor),
            recent=(*self.recent[1 - window :], seen),
        )

    def since(self, iteration: int) -> tuple[Seen, ...]:
        return tuple(seen for seen in self.recent if seen.iteration >= iteration)


def typical(seen: Iterable[Seen]) -> Excess:
    """Medians of the excesses over these iterations: robust against just under half of them."""
    rows = [s.excess for s in seen]

    def middle(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    own = median(row.own for row in rows)
    return Excess(own, middle([row.peers for row in rows]), middle([row.mates for row in rows]))
