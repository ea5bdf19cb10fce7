"""Who of a data-parallel training is given which samples: a function of the division, the samples and nothing else.

Ranks, which are given their samples by it, and whoever predicts what a division would gain, go by the same functions.

1. the samples of `window` global batches are sorted by length and cut into as many batches again (`grouped`): each sample
   still counts once, and those of a batch are alike;
2. each global batch is given out: in the loader's own order by the counts alone or, where lengths are balanced, the longest
   first, each to the rank that would be done first with it and has room left (`split`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

FORESEEN = 48
"""By so many global batches it is predicted what a division gains: of two ranks with four samples each the gain by 24 others is
a third off in one of twenty cases, by those that come a tenth."""
MOST_AHEAD = 65_536
"""Samples: in batches of very many the draw matters little."""


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """`samples` of each whole global batch go to the rank of that number, 0 = it has left. `window`: lengths are balanced over
    so many global batches, 0 = samples stay in the loader's order.

    A sample of n tokens takes ``token_us * n + token2_us * n * n`` on a healthy rank, `slowness` times that on each (empty =
    all alike). `padded`: the samples of a rank's batch are made as long as its longest.
    """

    samples: tuple[int, ...]
    window: int = 0
    token_us: float = 1.0
    token2_us: float = 0.0
    slowness: tuple[float, ...] = ()
    padded: bool = False

    @property
    def total(self) -> int:
        """Samples of a whole global batch: the same whatever the division."""
        return sum(self.samples)

    @property
    def fewer(self) -> frozenset[int]:
        """The ranks that are given less than an even part, those that have left among them."""
        return frozenset(rank for rank, count in enumerate(self.samples) if count * len(self.samples) < self.total)

    def cost_us(self, length: float) -> float:
        """Of one sample on a healthy rank."""
        return self.token_us * length + self.token2_us * length * length

    def batch_us(self, lengths: Sequence[float]) -> float:
        """Of a rank's samples together, on a healthy rank."""
        if self.padded and lengths:
            return len(lengths) * self.cost_us(max(lengths))
        return sum(map(self.cost_us, lengths))


def grouped(batches: Sequence[Sequence[float]], division: Division, seed: str) -> list[list[tuple[int, int]]]:
    """The samples of some global batches (their lengths) as as many batches of the same sizes; a sample is (batch, place).

    Their order is drawn by `seed`, so that training is not given all that is long at once.
    """
    places = [(batch, place) for batch, of in enumerate(batches) for place in range(len(of))]
    sizes = [len(of) for of in batches]
    if division.window > 1:
        places.sort(key=lambda at: (-batches[at[0]][at[1]], at))
    found, first = [], 0
    for size in sizes:
        found.append(sorted(places[first : first + size]))
        first += size
    if division.window > 1:
        random.Random(seed).shuffle(found)
    return found


def split(lengths: Sequence[float], division: Division) -> list[list[int]]:
    """One global batch, by the lengths of its samples in the loader's order: rank -> the places of those it is given."""
    samples = division.samples
    given: list[list[int]] = [[] for _ in samples]
    if not division.window:
        first = 0
        for rank, count in enumerate(samples):
            given[rank] = [*range(first, first + count)]
            first += count
        return given
    slowness = division.slowness or (1.0,) * len(samples)
    loads = [0.0] * len(samples)
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        cost = division.cost_us(lengths[place])
        open_ = [rank for rank, count in enumerate(samples) if len(given[rank]) < count]
        rank = min(open_, key=lambda rank: ((loads[rank] + cost) * slowness[rank], rank))
        given[rank].append(place)
        loads[rank] += cost
    return [sorted(of) for of in given]


def weights(lengths: Sequence[float], given: Sequence[Sequence[int]], *, by_tokens: bool) -> list[float]:
    """rank -> by how much its gradient counts in the mean over the ranks that are given samples, so that the mean is that over
    all samples (or all tokens) of the batch; exactly 1.0 where all ranks have the same."""
    parts = [sum(lengths[place] for place in of) if by_tokens else len(of) for of in given]
    ranks, whole = sum(1 for of in given if of), sum(parts)
    return [1.0 if part * ranks == whole else part * ranks / whole for part in parts]


def foreseen(window: int) -> int:
    """By how many global batches a division of their lengths over `window` of them is judged."""
    return max(FORESEEN, 2 * window)


def ahead(window: int, total: int) -> int:
    """So many batches of `total` samples a loader says at once, before half of them are over."""
    return min(2 * foreseen(window), max(MOST_AHEAD // total, window))
