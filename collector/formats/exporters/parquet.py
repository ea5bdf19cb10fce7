"""A run's views as Parquet files, one per view that has a column `run`."""

from __future__ import annotations

from pathlib import Path

from unskew.collector.read.reader import Reader
from unskew.collector.read.views import VIEWS


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the files into the folder `path`, which is there; returns a sentence on what is in it."""
    rows = 0
    views = [view for view in VIEWS if "run" in reader.sql(f"select * from {view} limit 0").columns]
    for view in views:
        table = reader.sql(f"select * from {view} where run = ?", [run])
        table.write_parquet(path / f"{view}.parquet")
        rows += table.height
    return f"{len(views)} views, {rows:,} rows"
