"""How much longer a rank took than the slowest of the others, by plain medians over a store's spans: no detector's reading."""

from __future__ import annotations

from pathlib import Path

from unskew.collector.read.reader import open_store


def times_as_long(store: Path, run: str, rank: int, kind: str, iterations: tuple[int, int]) -> float:
    """Of one kind of work, over iterations [first, end)."""
    with open_store(store) as reader:
        took = reader.sql(
            "select rank, median(us) from (select rank, iteration, sum(coalesce(compute_us, wall_us)) as us from spans"
            " where run = ? and kind = ? and iteration >= ? and iteration < ? group by all) group by rank",
            [run, kind, *iterations],
        )
    us = dict(took.iter_rows())
    return float(us.pop(rank) / max(us.values()))
