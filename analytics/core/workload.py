"""The work in a micro-batch, as the cost model sees it.

ResiHP (section 4.2, eq. 1): the time of a packed micro-batch is linear in its tokens and in the sum of its squared document
lengths, because attention stays within a document. One 4K document costs four times the attention of four 1K documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Work(msgspec.Struct, frozen=True, gc=False):
    """`tokens` = sum of the document lengths, `sum_sq` = sum of their squares (token^2)."""

    tokens: int
    sum_sq: int


def work_of(lengths: Sequence[int]) -> Work:
    """The work of a micro-batch packed from documents of these lengths (tokens).

    >>> work_of([4, 4])
    Work(tokens=8, sum_sq=32)
    """
    return Work(sum(lengths), sum(length * length for length in lengths))
