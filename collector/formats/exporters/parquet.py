"""A run's views as Parquet files in a new folder, one per view that has a column `run`."""

from __future__ import annotations

import shutil
from pathlib import Path

from unskew.collector.formats.imported import FormatError
from unskew.collector.read.reader import Reader
from unskew.collector.read.views import VIEWS


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the folder, whole or not at all; returns a sentence on what is in it. Raises `FormatError` when something is
    there already."""
    if path.exists():
        raise FormatError(f"{path} exists already: name a folder that does not")
    aside = path.with_name(f".{path.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    rows = 0
    try:
        views = [view for view in VIEWS if "run" in reader.sql(f"select * from {view} limit 0").columns]
        for view in views:
            table = reader.sql(f"select * from {view} where run = ?", [run])
            table.write_parquet(aside / f"{view}.parquet")
            rows += table.height
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{len(views)} views, {rows:,} rows"
