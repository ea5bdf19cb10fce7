"""Parts of a layer: what each member of a tensor-parallel group holds, and which ranks have which piece in common.

Attention heads, columns of the feed-forward network and the vocabulary are cut at the same fractions of a layer, so a part is
an interval of [0, 1); the model rounds its ends to whole heads, columns and tokens. What is not cut (the norms) every member
has. Where replicas are cut differently, the union of all ends divides a layer into pieces, each of which some ranks hold alike:
the unit in which gradients are summed and layers move.

>>> three, two = parts_by([1, 1, 1]), parts_by([1, 1])
>>> for piece, ranks in pieces_of(0, dict(enumerate([*three, *two]))):
...     print(piece.low, piece.high, ranks)
0 0 (0, 1, 2, 3, 4)
0 1/3 (0, 3)
1/3 1/2 (1, 3)
1/2 2/3 (1, 4)
2/3 1 (2, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

import msgspec

ZERO, ONE = Fraction(0), Fraction(1)


class Part(msgspec.Struct, frozen=True):
    """``[first / of, end / of)`` of each layer that a rank holds."""

    first: int
    end: int
    of: int

    @property
    def low(self) -> Fraction:
        return Fraction(self.first, self.of)

    @property
    def high(self) -> Fraction:
        return Fraction(self.end, self.of)

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


WHOLE = Part(0, 1, 1)


class Piece(msgspec.Struct, frozen=True):
    """``[low, high)`` of what is cut of a layer and, where `uncut`, also what is not cut: the whole of it by default."""

    layer: int
    low: Fraction = ZERO
    high: Fraction = ONE
    uncut: bool = True


def parts_by(weights: Sequence[int]) -> tuple[Part | None, ...]:
    """A layer in parts of these sizes; None = the whole layer, of a member that is alone.

    >>> [str(part) for part in parts_by([5, 3])]
    ['0 to 5/8', '5/8 to 1']
    """
    if len(weights) == 1:
        return (None,)
    ends = list(accumulate(weights, initial=0))
    return tuple(Part(first, end, ends[-1]) for first, end in pairwise(ends))


def part_of(first: int, end: int, of: int) -> Part | None:
    """The part of these numbers; None = the whole layer, however that is written."""
    return None if (first, end) == (0, of) else Part(first, end, of)


def part_between(low: Fraction, high: Fraction) -> Part:
    """The part with these ends.

    >>> str(part_between(Fraction(1, 2), Fraction(5, 8)))
    '1/2 to 5/8'
    """
    of = lcm(low.denominator, high.denominator)
    return Part(int(low * of), int(high * of), of)


def ends_of(part: Part | None) -> tuple[Fraction, Fraction]:
    """Where a part begins and ends; None = the whole layer."""
    return (ZERO, ONE) if part is None else (part.low, part.high)


def size_of(part: Part | None) -> float:
    """How much of a layer a part is.

    >>> size_of(Part(1, 4, 4)), size_of(None)
    (0.75, 1.0)
    """
    return 1.0 if part is None else (part.end - part.first) / part.of


def make_whole(parts: Iterable[Part | None]) -> bool:
    """Whether parts, in this order, are a whole layer: each begins where the one before ends."""
    end, of = 0, 1
    for part in parts:
        piece = part or WHOLE
        if piece.first * of != end * piece.of or piece.end <= piece.first:
            return False
        end, of = piece.end, piece.of
    return end == of


def pieces_of(layer: int, parts: Mapping[int, Part | None]) -> list[tuple[Piece, tuple[int, ...]]]:
    """The layer in pieces with the ranks that hold each, when rank r has `parts[r]` of it. Nobody: ()."""
    ranks = tuple(sorted(parts))
    if all(part is None for part in parts.values()):
        return [(Piece(layer), ranks)]
    ends = {rank: ends_of(part) for rank, part in parts.items()}
    pieces = [(Piece(layer, ZERO, ZERO), ranks)]
    for low, high in pairwise(sorted({ZERO, ONE}.union(*ends.values()))):
        holders = tuple(rank for rank in ranks if ends[rank][0] <= low and high <= ends[rank][1])
        pieces.append((Piece(layer, low, high, uncut=False), holders))
    return pieces


def unit(fraction: Fraction, size: int) -> int:
    """The whole unit (head, column, token of the vocabulary) at which a layer is cut there; of `size`.

    >>> unit(Fraction(5, 8), 8), unit(Fraction(5, 8), 704)
    (5, 440)
    """
    return (2 * fraction.numerator * size + fraction.denominator) // (2 * fraction.denominator)


def common(layer: int, one: Part | None, other: Part | None) -> Piece:
    """What two parts have in common: what is not cut, and where they overlap."""
    (low, high), (first, end) = ends_of(one), ends_of(other)
    return Piece(layer, max(low, first), min(high, end)) if max(low, first) < min(high, end) else Piece(layer, ZERO, ZERO)
