"""A copy of a store, or of one run, in one DuckDB file: tables of the log and of its projections, and every view over them.

It reads no other file, so it opens anywhere; store.duckdb (service/snapshot.py) names the files of its store instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import duckdb

from unskew.collector.files import rows
from unskew.collector.files.rows import quoted
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.read.reader import Reader
from unskew.collector.read.views import create_views

STORAGE: dict[str, str | bool | int | float | list[str]] = {"storage_compatibility_version": "v1.0.0"}
"""The form of a database file, which DuckDB reads from 1.0 on; its own newest would shut out every version before."""
_BATCH_ROWS = 100_000


def write_copy(reader: Reader, out: Path, run: str | None = None) -> int:
    """Write what `reader` sees (of `run`) to `out`, under its name when it is whole; returns the rows of the log."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        with duckdb.connect(str(fresh), config=STORAGE) as database:
            database.execute("set enable_progress_bar = false").fetchall()
            rows.create_table(database, "log")
            create_views(database)
            ((count,),) = _fill(database, reader, "log", run)
            for name in PROJECTIONS:
                table = f"projected.{name}"
                database.execute(f"create temp table empty as select * from {table} limit 0").fetchall()
                database.execute(f"drop view {table}").fetchall()
                database.execute(f"create table {table} as from empty").fetchall()
                database.execute("drop table empty").fetchall()
                _fill(database, reader, table, run)
            database.execute("checkpoint").fetchall()
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
    return int(count)


def _fill(database: duckdb.DuckDBPyConnection, reader: Reader, table: str, run: str | None) -> list[tuple[int]]:
    of_run = f" where run = {quoted(run)}" if run else ""
    database.register("taken", reader.duckdb(f"select * from {table}{of_run}").to_arrow_reader(_BATCH_ROWS))
    counted: list[tuple[int]] = database.execute(f"insert into {table} by name select * from taken").fetchall()
    database.unregister("taken")
    return counted
