"""By how much later iterations end where tensor-parallel groups are larger.

What groups exchange is in part work of the hosts, which no chunk shows: it is in the end of iterations, a constant of the fit.
How much of it is the groups' shows when a plan comes whose largest group has another size. It is learned then, once, from the
fits before and after: what changes later is the machine's, and no reason to go back and forth between sizes.
"""

from __future__ import annotations

import msgspec


class EndsBySize(msgspec.Struct, frozen=True):
    """`size`: how many members the largest group had in the iterations of the fit; `later_us`: size -> by how much iterations
    end later than with the first size.

    >>> ends = EndsBySize().fitted(2, 300.0, None).fitted(4, 2000.0, 300.0).fitted(4, 2100.0, 2000.0)
    >>> ends.more, ends.fitted(2, 400.0, 2100.0).more
    (((2, -1700.0),), ((4, 1700.0),))
    """

    size: int = 1
    later_us: dict[int, float] = {}

    def fitted(self, size: int, end_us: float, before_us: float | None) -> EndsBySize:
        """After a fit on iterations with groups of `size`, whose end is `end_us`; `before_us`: that of the fit before it."""
        known = self.later_us or {size: 0.0}
        if size not in known and before_us is not None:
            known = {**known, size: known[self.size] + end_us - before_us}
        return EndsBySize(size, known)

    @property
    def more(self) -> tuple[tuple[int, float], ...]:
        """`CostModel.end_more_us`."""
        now_us = self.later_us[self.size]
        return tuple((size, us - now_us) for size, us in self.later_us.items() if size != self.size)
