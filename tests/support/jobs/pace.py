"""How much longer a rank took than others, or than else, by plain medians over a store's spans: no detector's reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from unskew.collector.read.reader import open_store

CHUNKS = ("F", "B")
FEW = 4
"""Iterations that show nothing."""


def times_as_long(store: Path, run: str, rank: int, kind: str, iterations: tuple[int, int]) -> float:
    """Than the slowest of the others: of one kind of work, over iterations [first, end)."""
    first, end = iterations
    took = _own_us(store, run, kind).filter(pl.col("iteration").is_between(first, end, closed="left"))
    us = dict(took.group_by("rank").agg(pl.col("us").median()).iter_rows())
    return float(us.pop(rank) / max(us.values()))


def times_as_long_as_before(store: Path, run: str, rank: int, kind: str, iterations: tuple[int, int]) -> float:
    """Than the same rank before them; than after them, where they begin with the run."""
    first, end = iterations
    took = _own_us(store, run, kind).filter((pl.col("rank") == rank) & (pl.col("iteration") > 0))
    during = took.filter(pl.col("iteration").is_between(first, end, closed="left"))
    before = took.filter(pl.col("iteration") < first) if first > FEW else took.filter(pl.col("iteration") >= end)
    return float(np.median(during["us"]) / np.median(before["us"])) if before.height else 1.0


def moved(store: Path, run: str) -> float:
    """By how much (log) the ratio of two ranks' times for passes moves from one quarter of the run to another, at most."""
    spreads = []
    for kind in CHUNKS:
        both = _own_us(store, run, kind).pivot("rank", index="iteration", values="us").sort("iteration").drop_nulls()
        ratio = (both["0"].log() - both["1"].log()).to_numpy()[1:]
        spreads.append(float(np.ptp([np.median(quarter) for quarter in np.array_split(ratio, 4)])))
    return max(spreads)


def _own_us(store: Path, run: str, kind: str) -> pl.DataFrame:
    """rank, iteration, us."""
    with open_store(store) as reader:
        return reader.sql(
            "select rank, iteration, sum(coalesce(compute_us, wall_us))::double as us from spans where run = ? and kind = ?"
            " group by all",
            [run, kind],
        )
