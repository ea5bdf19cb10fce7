"""Units in whole shares such that the largest load is as small as it can be: layers over stages, micro-batches over replicas.

Greedy and exact: every unit goes to the part that it makes least large, the first of equals.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence

from unskew.analytics.core.plan import PlanError


def share_out(
    total: int, parts: Sequence[tuple[float, float]], limits: Sequence[int] = (), *, least: Sequence[int] = ()
) -> list[int]:
    """`total` units in shares such that the largest of ``fixed + each * share`` is as small as it can be.

    `parts` are (fixed, each), `limits` the largest share of each part, `least` the smallest (1). Raises `PlanError` when these
    leave no room.

    >>> share_out(12, [(0, 1 / 1.0), (0, 1 / 0.4), (0, 1 / 1.0)])
    [5, 2, 5]
    """
    room, least = list(limits) or [total] * len(parts), least or [1] * len(parts)
    if total < sum(least) or any(most < few for most, few in zip(room, least, strict=True)) or sum(room) < total:
        raise PlanError(f"{total} units do not fit {len(parts)} parts that take at least {max(least)} and at most {room}")
    return _greedy(total, lambda part, share: parts[part][0] + parts[part][1] * share, least, room)


def share_out_within(total: int, parts: Sequence[tuple[float, float]], end_of: Callable[[int, int], int]) -> list[int]:
    """As `share_out`, where the units differ in what else they take: part p has room for those from `first` up to
    ``end_of(p, first)``. Shares are as even as without limits where these allow it, else the first parts take what they can.

    >>> share_out_within(6, [(0, 1), (0, 1)], lambda part, first: first + 2 if first == 0 else 6)
    [2, 4]
    """
    even = share_out(total, parts)
    if all(sum(even[: part + 1]) <= end_of(part, sum(even[:part])) for part in range(len(parts))):
        return even

    def within(most: float) -> list[int] | None:
        found, first = list[int](), 0
        for part, (fixed, each) in enumerate(parts):
            count = min(end_of(part, first) - first, total - first - (len(parts) - part - 1))
            if each > 0:
                count = min(count, int((most - fixed) / each + 1e-9))
            if count < 1:
                return None
            found.append(count)
            first += count
        return found if first == total else None

    loads = sorted({fixed + each * share for fixed, each in parts for share in range(1, total + 1)})
    least = bisect_left(loads, True, key=lambda most: within(most) is not None)
    found = within(loads[least]) if least < len(loads) else None
    if found is None:
        raise PlanError(f"{total} units do not fit {len(parts)} parts that have room for some of them")
    return found


def proportional(total: int, weights: Sequence[float], *, least: int = 0) -> list[int]:
    """`total` units in shares of at least `least` such that the largest ``share / weight`` is as small as it can be.

    >>> proportional(12, [1.0, 0.4, 1.0], least=1)
    [5, 2, 5]
    """
    if any(weight <= 0 for weight in weights):
        raise PlanError("a share needs a positive weight")
    return _greedy(total, lambda part, share: share / weights[part], [least] * len(weights), [total] * len(weights))


def split_work(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """How many of the consecutive `weights` each part takes, at least 1, such that the largest ``load / share`` is as small as
    it can be.

    >>> split_work([1, 1, 1, 1, 4], [1, 1])
    [4, 1]
    """
    low, high = 0.0, sum(weights) / min(shares)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(weights, shares, middle) else (middle, high)
    found = _within(weights, shares, high)
    if found is None:
        raise PlanError(f"{len(weights)} layers do not fill {len(shares)} parts that take at least 1")
    return found


def _within(weights: Sequence[float], shares: Sequence[float], most: float) -> list[int] | None:
    """Parts whose load is at most `most` times their share, each as long as it can be; None when there are none."""
    counts, first = list[int](), 0
    for part, share in enumerate(shares):
        end, load = first, 0.0
        left = len(shares) - part - 1
        while end < len(weights) - left and (end == first or load + weights[end] <= most * share * (1 + 1e-9)):
            load += weights[end]
            end += 1
        if end == first or load > most * share * (1 + 1e-9):
            return None
        counts.append(end - first)
        first = end
    return counts if first == len(weights) else None


def _greedy(total: int, load: Callable[[int, int], float], least: Sequence[int], room: Sequence[int]) -> list[int]:
    shares = list(least)
    heap = [(load(part, share + 1), part) for part, share in enumerate(shares) if share < room[part]]
    heapq.heapify(heap)
    for _ in range(total - sum(shares)):
        part = heap[0][1]
        shares[part] += 1
        if shares[part] < room[part]:
            heapq.heapreplace(heap, (load(part, shares[part] + 1), part))
        else:
            heapq.heappop(heap)
    return shares
