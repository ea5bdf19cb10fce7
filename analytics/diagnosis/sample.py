"""Which iterations of a long run are looked at: stretches spread evenly over it, the first and the last among them.

Stretches and not single iterations, because the Detector compares neighbours, and a sorted log gives them without being read
whole. All of it would take time and memory that grow with the run, for an answer that seldom needs them.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

MOST_EVENTS = 250_000
"""A run with no more is looked at whole; else so many events are read: seconds of work and some 300 MB."""
STRETCHES = 10
LEAST_ITERATIONS = 16
"""Of one stretch, where so many can be read: fewer show no slow device."""


class Sample(msgspec.Struct, frozen=True):
    """The stretches, (first, last) each, both of them in it; of a run whose log has `events` events and these `iterations`."""

    stretches: tuple[tuple[int, int], ...]
    iterations: int
    events: int

    @property
    def looked_at(self) -> int:
        return sum(last - first + 1 for first, last in self.stretches)

    @property
    def what(self) -> str:
        """What was looked at."""
        each = self.stretches[0][1] - self.stretches[0][0] + 1
        many = f"{len(self.stretches)} stretches of {each:,}" if len(self.stretches) > 1 else "one stretch"
        return f"{self.looked_at:,} of {self.iterations:,} iterations, {many}"

    @property
    def unseen(self) -> str:
        """What cannot be said for it."""
        gap = max((after[0] - one[1] - 1 for one, after in pairwise(self.stretches)), default=0)
        return (
            f"what came and went between the iterations looked at ({self.what}: the log has {self.events:,} events), and to "
            f"within {gap:,} iterations when something began"
        )


def sample(first: int, last: int, events: int) -> Sample | None:
    """What to look at of iterations `first` to `last`; None = all.

    >>> sample(0, 99, 500_000).stretches
    ((0, 15), (42, 57), (84, 99))
    """
    count = last - first + 1
    may = max(1, int(count * MOST_EVENTS / events)) if events else count
    if may >= count:
        return None
    several = max(1, min(STRETCHES, may // LEAST_ITERATIONS))
    each = may // several
    starts = [first + round(i * (count - each) / max(1, several - 1)) for i in range(several)]
    return Sample(tuple((start, start + each - 1) for start in starts), count, events)
