"""store.duckdb: a database with every view, for people and tools that open a DuckDB file rather than ask through us.

It is written beside and renamed into place when the collector comes to rest, so anybody may open it at any time, also while a
collector runs; nobody of us reads it. It holds the rows that were not sealed then, and views over the sealed and published
files of that moment; `made` records which (the manifest's number) and when.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from unskew.collector.files import rows
from unskew.collector.files.manifest import Manifest, SealedFile, load
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import published_state
from unskew.collector.read.views import create_views, project
from unskew.collector.service.ingest import SETTINGS

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]  # it ships no types


_FILES = re.compile(r"(?:sealed/[^/']+|published)/[^/']+\.parquet")
_known: dict[Path, tuple[tuple[int, int], frozenset[str]]] = {}
"""What each database read when it was last looked at, and the file it was then: (mtime in ns, inode)."""


def write_snapshot(store: Store, hot: pyarrow.Table | None = None) -> None:
    """Swap store.duckdb for one of the manifest's files and what open spool files hold; for the one that writes both.

    `hot`: what these held a moment ago, when it is to be of that.
    """
    manifest = load(store)
    fresh = store.database.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    try:
        _write(store, manifest, fresh, hot)
        fresh.replace(store.database)
    finally:
        fresh.unlink(missing_ok=True)


def files_read(store: Store) -> frozenset[str] | None:
    """The sealed and published files that the views of store.duckdb read, relative to the store: they stay as long as it does.
    None when it cannot be opened, as while somebody holds it for writing."""
    try:
        status = store.database.stat()
    except FileNotFoundError:
        return frozenset()
    version = (status.st_mtime_ns, status.st_ino)
    known = _known.get(store.database)
    if known is None or known[0] != version:
        try:
            with duckdb.connect(str(store.database), read_only=True) as database:
                views = database.sql("select sql from duckdb_views() where not internal").fetchall()
        except duckdb.Error:
            return None
        known = _known[store.database] = version, frozenset(file for (sql,) in views for file in _FILES.findall(sql))
    return known[1]


def _write(store: Store, manifest: Manifest, fresh: Path, hot: pyarrow.Table | None) -> None:
    with duckdb.connect(str(fresh), config=SETTINGS) as database:
        database.execute("set enable_progress_bar = false").fetchall()
        # Else each view that is defined opens every file again, and all of a large store's footers are in memory many times.
        database.execute("set parquet_metadata_cache = true").fetchall()
        database.execute("create table made as select ?::bigint as manifest, ?::bigint as at_us", [
            manifest.number, time.time_ns() // 1000,
        ]).fetchall()  # fmt: skip
        rows.create_table(database, "hot")
        if hot is not None:
            database.register("taken", hot)
            line = f"case when payload = {rows.LINE} then null else payload end"  # the form in which the rest is written
            database.execute(f"insert into hot by name select * replace ({line} as payload) from taken").fetchall()
            database.unregister("taken")
        for run in store.spooled_runs() if hot is None else ():
            tail = Tail(store, run, skip={(file.writer, file.segment) for _, file in manifest.replaced(run)})
            tail.behind = True
            while tail.behind:
                rows.insert(database, "hot", run, tail.poll_lines())
        _define_views(database, store, manifest)
        database.execute("checkpoint").fetchall()


def _define_views(database: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> None:
    database.execute(f"create view log as {_with_hot(store, manifest.sealed)}").fetchall()
    create_views(database)
    now = published_state(manifest)
    database.execute(f"create view unprojected as {_with_hot(store, now.open)}").fetchall()
    project(database, {name: now.relation(store, name) for name in PROJECTIONS if now.tiers}, "unprojected")


def _with_hot(store: Store, sealed: Sequence[SealedFile]) -> str:
    files = ", ".join(rows.quoted(str(store.root / one.file)) for one in sealed)
    more = f" union all by name select * from read_parquet([{files}], union_by_name = true)" if files else ""
    return f"select * from hot{more}"
