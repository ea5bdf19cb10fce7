"""Files that hold one table."""

from __future__ import annotations

from pathlib import Path

import polars as pl


def read_table(path: Path) -> pl.DataFrame:
    """A CSV or Parquet file, as its name ends. Raises `OSError` and Polars' errors."""
    return pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)
