"""store.duckdb: a database with every view, for people and tools that open a DuckDB file rather than ask through us.

It is written beside and renamed into place every few seconds while there is news, so anybody may open it at any time and hold
it open; nobody of us reads it. It holds the rows that were not sealed then, and views over the sealed and published files of
that moment, by their names in the store's folder; `made` records which (the manifest's number) and when.
"""

from __future__ import annotations

import functools
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb

from unskew.collector.files import rows
from unskew.collector.files.manifest import Manifest, load
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import published_state
from unskew.collector.read.copy import STORAGE
from unskew.collector.read.reader import Reader
from unskew.collector.read.views import create_views, project
from unskew.collector.service.ingest import SETTINGS

WRITING = threading.Lock()
"""Held while store.duckdb is written: no file is removed meanwhile because nothing seems to read it."""

_PREFIX = "coalesce(getvariable('store') || '/', '')"
"""Where the files are looked for: from a reader's working directory, unless it sets the variable. DuckDB has no better."""
_HERE = "start-duckdb-in-this-store"
"""Begins the name of an empty folder that only this store has. The files are named by way of it, so that beside another store,
or elsewhere, DuckDB finds none, and says this."""
_FILES = re.compile(r"(?:sealed/[^/']+|published)/[^/']+\.parquet")
_known: dict[Path, tuple[tuple[int, int], frozenset[str]]] = {}
"""What each database read when it was last looked at, and the file it was then: (mtime in ns, inode)."""


def write_snapshot(store: Store, reader: Reader | None = None) -> None:
    """Swap store.duckdb for one of the manifest's files and what open spool files hold; for the one that writes both.

    `reader`: what it has seen, when it is to be of that. Raises `duckdb.Error` when files of that are gone meanwhile.
    """
    with WRITING:
        _swap(store, reader)


def _swap(store: Store, reader: Reader | None) -> None:
    fresh = store.database.with_suffix(".new")
    # DuckDB would read what one who was killed here left behind into the new one.
    _log_of(fresh).unlink(missing_ok=True)
    try:
        _write(store, reader, fresh)
        # What a person wrote into the one before is no part of this one.
        _log_of(store.database).unlink(missing_ok=True)
        fresh.replace(store.database)
    finally:
        fresh.unlink(missing_ok=True)


def not_written(store: Store, error: Exception) -> str:
    """What is said of a snapshot that failed; the one before stays."""
    return f"{store.database.name} was not written: {str(error).partition(chr(10))[0]}"


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


def _log_of(database: Path) -> Path:
    """Where DuckDB keeps what is not in the file yet."""
    return database.with_name(f"{database.name}.wal")


def _write(store: Store, reader: Reader | None, fresh: Path) -> None:
    manifest = load(store) if reader is None else reader.manifest
    fresh.write_bytes(_views_alone())
    with duckdb.connect(str(fresh), config={**SETTINGS, **STORAGE}) as database:
        database.execute("set enable_progress_bar = false").fetchall()
        # Else each view that is defined opens every file again, and all of a large store's footers are in memory many times.
        database.execute("set parquet_metadata_cache = true").fetchall()
        database.execute("set variable store = ?", [str(store.root)]).fetchall()
        database.execute("create table made as select ?::bigint as manifest, ?::bigint as at_us", [
            manifest.number, time.time_ns() // 1000,
        ]).fetchall()  # fmt: skip
        if reader is not None:
            database.register("taken", reader.sources().hot)
            line = f"case when payload = {rows.LINE} then null else payload end"  # the form in which the rest is written
            database.execute(f"insert into hot by name select * replace ({line} as payload) from taken").fetchall()
            database.unregister("taken")
        for run in store.spooled_runs() if reader is None else ():
            tail = Tail(store, run, skip={(file.writer, file.segment) for _, file in manifest.replaced(run)})
            tail.behind = True
            while tail.behind:
                rows.insert(database, "hot", run, tail.poll_lines())
        _read_files(database, store, manifest)
        database.execute("checkpoint").fetchall()


@functools.cache
def _views_alone() -> bytes:
    """A database of all views over an empty log, the same for every store: to define them takes longer than all the rest."""
    with tempfile.TemporaryDirectory(prefix="unskew-") as folder:
        path = Path(folder) / "views.duckdb"
        with duckdb.connect(str(path), config={**SETTINGS, **STORAGE}) as database:
            rows.create_table(database, "hot")
            database.execute("create view log as select * from hot").fetchall()
            create_views(database)
            database.execute("checkpoint").fetchall()
        return path.read_bytes()


def _read_files(database: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> None:
    """Define the views anew that read files."""
    here, now = _own_folder(store), published_state(manifest)

    def parquet(files: Sequence[str]) -> str:
        listed = ", ".join(rows.quoted(f"{here}/../{file}") for file in files)
        return f"select * from read_parquet(list_transform([{listed}], lambda file: {_PREFIX} || file))"

    sealed, unprojected = [one.file for one in manifest.sealed], [one.file for one in now.open]
    # Where the projections lie, not beside `log`: that is where DuckDB looks for it when the file is attached to another.
    for view, files in (("log", sealed), ("projected.unprojected", unprojected)):
        more = f" union all by name {parquet(files)}" if files else ""
        database.execute(f"create or replace view {view} as select * from main.hot{more}").fetchall()
    published = {name: parquet([tier.entries[name].file for tier in now.tiers]) for name in PROJECTIONS if now.tiers}
    project(database, published, "projected.unprojected")


def _own_folder(store: Store) -> str:
    """The name of the empty folder that only this store has.

    It ends with the folder's own number, by which that of a copy is known as such: a copy gets its own before anything else is
    written to it, because the two may come to have different files of one name.
    """
    for path in store.root.glob(f"{_HERE}-*"):
        if path.name.endswith(f".{path.stat().st_ino}"):
            return path.name
        path.rmdir()
    fresh = store.root / f"{_HERE}.new"
    fresh.mkdir(exist_ok=True)
    return fresh.rename(store.root / f"{_HERE}-{secrets.token_hex(4)}.{fresh.stat().st_ino}").name
