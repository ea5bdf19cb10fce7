"""The iterations that the charts show: those in the log, side by side, however far their numbers lie apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import polars as pl

STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
MOST_LABELS = 16


class Window(msgspec.Struct, frozen=True):
    """`iterations` ascend and are at least one. A position is a place among them, from 0 on."""

    iterations: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.iterations[0]

    @property
    def last(self) -> int:
        return self.iterations[-1]

    def holds(self, iteration: int) -> bool:
        """Whether the iteration lies between the first and the last, in the log or not."""
        return self.first <= iteration <= self.last

    def position(self, iteration: int) -> int:
        """The position of the iteration; of the next one when it is not in the log."""
        return min(bisect_left(self.iterations, iteration), len(self.iterations) - 1)

    def placed(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows (with a column `iteration`) of the window, and their position as `x`."""
        axis = pl.DataFrame({"iteration": self.iterations, "x": range(len(self.iterations))}, schema_overrides={"x": pl.Int64})
        return rows.join(axis, on="iteration", how="inner", maintain_order="left")

    @property
    def label_step(self) -> int:
        """Every how many positions the axis names an iteration."""
        return label_step(len(self.iterations))


def label_step(length: int) -> int:
    """A round number of positions between two names, so that there are some 16 at most."""
    return next((step for step in STEPS if length / step <= MOST_LABELS), 1000)


def newest(iterations: Sequence[int], size: int | None) -> Window:
    """The last `size` iterations (None: all) and a few more, so that it begins at a round one and does not move for a while.

    >>> newest(range(1, 95), 60).first
    35
    """
    begin = 0 if size is None else max(0, len(iterations) - size)
    step = label_step(len(iterations) - begin)
    rounder = next((at for at in range(begin, max(-1, begin - step), -1) if iterations[at] % step == 0), begin)
    return Window(tuple(iterations[rounder:]))


def around(iterations: Sequence[int], chosen: int, reach: int) -> Window:
    """The chosen iteration with `reach` others on each side."""
    middle = bisect_left(iterations, chosen)
    return newest(iterations[: middle + reach + 1], 2 * reach + 1)
