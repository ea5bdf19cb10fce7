"""What passes between two tensor-parallel groups: each byte of a hidden state once, spread over all members of both.

Every member of the group that sends has the whole tensor, every member of the one that takes it needs it. So each sender stands
for its share, each taker receives its own and hands it to the rest of its group: scatter and gather (Narayanan et al. 2021,
section 4.1), here between groups of any sizes: the shares are cut where either side's end.

>>> [(one.sender, one.receiver, one.first, one.end) for one in crossings(6, (0, 1), (2, 3, 4))]
[(0, 2, 0, 2), (0, 3, 2, 3), (1, 3, 3, 4), (1, 4, 4, 6)]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec


class Crossing(msgspec.Struct, frozen=True, gc=False):
    """`sender` gives `receiver` the elements ``[first, end)`` of a flat tensor."""

    sender: int
    receiver: int
    first: int
    end: int


def share_ends(size: int, members: int) -> tuple[int, ...]:
    """Where the members' shares of a flat tensor end, from 0 on: as even as whole elements allow."""
    return tuple(member * size // members for member in range(members + 1))


@lru_cache(maxsize=4096)
def crossings(size: int, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[Crossing, ...]:
    """The messages of one tensor of `size` elements; a pair of ranks has one at most."""
    given, taken = share_ends(size, len(senders)), share_ends(size, len(receivers))
    return tuple(
        Crossing(senders[_share(given, first)], receivers[_share(taken, first)], first, end)
        for first, end in pairwise(sorted({*given, *taken}))
    )


@lru_cache(maxsize=4096)
def shares(senders: tuple[int, ...], receivers: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """(sender, receiver) -> how much of a tensor their message has.

    >>> shares((0, 1), (2,))
    {(0, 2): 0.5, (1, 2): 0.5}
    """
    size = len(senders) * len(receivers)
    return {(one.sender, one.receiver): (one.end - one.first) / size for one in crossings(size, senders, receivers)}


def _share(ends: Sequence[int], at: int) -> int:
    """Whose share an element is in."""
    return next(number for number, (first, end) in enumerate(pairwise(ends)) if first <= at < end)
