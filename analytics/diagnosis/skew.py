"""Skew by level, and how much of it reaches the iteration: the rows of the view `skew` (collector/read/skew.py) added up.

A slow device's own loss is 1; its tensor-parallel group, the other stages and the other replicas wait for it, so that the job
loses a multiple of it: ResiHP's amplification (Figure 2).

>>> rows = {"level": ["device", "pp"], "ratio": [2.0, 2.0], "spent_us": [50, 30], "lost_us": [10, 30]}
>>> two = pl.DataFrame({"iteration": [0, 0], **rows, "slowest": [1, 1], "predicted": [True, True]})
>>> [(one.level, one.amplification) for one in skew_of(two).levels]
[('device', 1.0), ('pp', 3.0)]
"""

from __future__ import annotations

from typing import Literal

import msgspec
import polars as pl

Level = Literal["device", "tp", "pp", "dp"]
LEVELS: tuple[Level, ...] = ("device", "tp", "pp", "dp")
LEAST_LOSS = 0.01
"""Of the chunk time of healthy devices: a smaller loss is the predictor's error, and says nothing when divided by."""


class LevelSkew(msgspec.Struct, frozen=True):
    """One level. `ratio`: its slowest part over its fastest, each over its healthy time (of `device`: the slowest device over
    its healthy time), the median of the iterations. `lost_us`: device-time lost in a mean iteration beyond what healthy devices
    would lose. `amplification`: that over what slow devices lost themselves; None where this is too little to divide by."""

    level: Level
    ratio: float
    lost_us: float
    amplification: float | None


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """Of `iterations`; `levels` from the device up, those that the run has. `slowest`: the rank that took longest most often,
    in `slowest_share` of the iterations. `predicted`: healthy is what was predicted, else the fastest device."""

    levels: tuple[LevelSkew, ...]
    iterations: int
    slowest: int
    slowest_share: float
    predicted: bool

    @property
    def lost_us(self) -> float:
        """Device-time lost in a mean iteration, all levels together."""
        return sum(one.lost_us for one in self.levels)

    @property
    def amplification(self) -> float | None:
        """What the iteration loses over what slow devices lose themselves: 1 = nobody waits for them, and less where the plan
        in force makes up for a part of it."""
        parts = [one.amplification for one in self.levels if one.amplification is not None]
        return sum(parts) if parts else None


def skew_of(rows: pl.DataFrame) -> Skew | None:
    """Of rows of the view `skew`, of one run; None of none."""
    if rows.is_empty():
        return None
    iterations = rows["iteration"].n_unique()
    sums = rows.group_by("level").agg(pl.col("ratio").median(), pl.col("lost_us", "spent_us").sum())
    of = {row["level"]: row for row in sums.iter_rows(named=True)}
    own_us = of["device"]["lost_us"]
    enough = own_us >= LEAST_LOSS * (of["device"]["spent_us"] - own_us)
    levels = tuple(
        LevelSkew(level, of[level]["ratio"], lost_us / iterations, lost_us / own_us if enough else None)
        for level in LEVELS
        if level in of and (lost_us := of[level]["lost_us"]) is not None
    )
    slowest = rows.filter(level="device")["slowest"].value_counts().sort("count", "slowest", descending=[True, False])
    return Skew(
        levels=levels,
        iterations=iterations,
        slowest=slowest["slowest"][0],
        slowest_share=slowest["count"][0] / iterations,
        predicted=bool(rows["predicted"].all()),
    )
