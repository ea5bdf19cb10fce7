"""The collector's database: rows and the byte offsets they came from are committed in one transaction, so a kill loses nothing.

The spool and the sealed files are the truth; a database that does not agree with itself or with the manifest (a damaged
write-ahead log can open with half its rows) is set aside and built again from them.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import duckdb

from unskew.collector import rows
from unskew.collector.manifest import Manifest, Replaced, load
from unskew.collector.paths import Store, StoreError
from unskew.collector.tail import Entry, Place, Tail
from unskew.collector.views import create_views

_FILES = "run varchar, writer varchar, segment bigint, bytes bigint, rows bigint, last_seq bigint"
_FORGET = """
delete from files where run = ? and (writer, segment) in (select (unnest(?::varchar[]), unnest(?::bigint[])))
"""
_REMEMBER = """
insert into files
select ?, unnest(?::varchar[]), unnest(?::bigint[]), unnest(?::bigint[]), unnest(?::bigint[]), unnest(?::bigint[])
"""
_LOCKED = "Could not set lock on file"
_SYSTEM_WORDS = frozenset(os.strerror(code) for code in errno.errorcode)


class DatabaseBusyError(StoreError):
    """Another process has the store's database open."""


class Ingest:
    """Takes new lines of all runs of a store into its database. For the one process that holds the collector's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.database = open_database(store, load(store))
        (last_pos,) = self.database.sql("select coalesce(max(pos), -1) from log").fetchall()[0]
        self._next_pos = last_pos + 1
        self._tails: dict[str, Tail] = {}
        self._files: dict[str, dict[Place, Replaced]] = {}

    def step(self) -> int:
        """Take what is new, one transaction per run; returns the number of rows."""
        return sum(self._take(run, self._tail(run).poll()) for run in self._store.spooled_runs())

    def files(self, run: str) -> dict[Place, Replaced]:
        """How far each spool file of `run` is taken."""
        if run not in self._files:
            known = self.database.execute(
                "select writer, segment, bytes, rows, last_seq from files where run = ? order by writer, segment", [run]
            ).fetchall()
            self._files[run] = {(row[0], row[1]): _file(*row) for row in known}
        return self._files[run]

    def forget(self, run: str) -> None:
        """The spool files of `run` are gone."""
        self._tails.pop(run, None)
        self._files.pop(run, None)

    def offset(self, run: str, place: Place) -> int:
        """How many bytes of a spool file are taken or passed over."""
        return self._tail(run).offsets.get(place, 0)

    def broken(self, run: str) -> int:
        """Whole lines of `run` that were no envelope and therefore passed over."""
        return self._tail(run).broken

    def close(self) -> None:
        self.database.execute("checkpoint").fetchall()
        self.database.close()

    def _tail(self, run: str) -> Tail:
        if run not in self._tails:
            self._tails[run] = Tail(self._store, run, offsets={place: file.bytes for place, file in self.files(run).items()})
        return self._tails[run]

    def _take(self, run: str, entries: list[Entry]) -> int:
        if not entries:
            return 0
        files = self.files(run)
        fresh = _advanced(files, entries, self._tails[run].offsets)
        writers, segments = zip(*fresh, strict=True)
        self.database.begin()
        rows.insert(self.database, "log", run, entries, self._next_pos)
        self.database.execute(_FORGET, [run, writers, segments]).fetchall()
        self.database.execute(
            _REMEMBER,
            [run, writers, segments]
            + [[getattr(file, name) for file in fresh.values()] for name in ("bytes", "rows", "last_seq")],
        ).fetchall()
        self.database.commit()
        files.update(fresh)
        self._next_pos += len(entries)
        return len(entries)


def _file(writer: str, segment: int, size: int, count: int, last_seq: int) -> Replaced:
    return Replaced(writer=writer, segment=segment, bytes=size, rows=count, last_seq=last_seq)


def _advanced(files: Mapping[Place, Replaced], entries: Sequence[Entry], offsets: Mapping[Place, int]) -> dict[Place, Replaced]:
    """The files that `entries` came from, as they stand with these."""
    fresh: dict[Place, Replaced] = {}
    for entry in entries:
        place = (entry.writer, entry.segment)
        before = fresh.get(place) or files.get(place)
        fresh[place] = _file(*place, offsets[place], before.rows + 1 if before else 1, entry.seq)
    return fresh


def open_database(store: Store, manifest: Manifest) -> duckdb.DuckDBPyConnection:
    """The store's database, built again when it is damaged.

    Raises `DatabaseBusyError` when another process has it open, `StoreError` when the system refuses.
    """
    try:
        database = _connect(store)
        if _agrees(database, manifest):
            return database
        database.close()
    except duckdb.Error as error:
        if _LOCKED in str(error):
            raise DatabaseBusyError(
                f"{store.database} is open in another process; collecting waits until it is closed there"
            ) from error
        # DuckDB ends such a message with the system's own words: no permission, a full disk. The database may be well.
        if any(words in str(error) for words in _SYSTEM_WORDS):
            raise StoreError(f"{store.database} cannot be opened: {str(error).partition(chr(10))[0]}") from error
    for suffix in ("", ".wal"):
        file = store.database.with_name(store.database.name + suffix)
        if file.exists():
            file.replace(file.with_name(file.name + ".damaged"))
    database = _connect(store)
    _restore(database, store, manifest)
    return database


def _connect(store: Store) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(str(store.database), config={"threads": 1})
    rows.create_table(database, "log")
    database.execute(f"create table if not exists files ({_FILES})").fetchall()
    create_views(database)
    return database


def _agrees(database: duckdb.DuckDBPyConnection, manifest: Manifest) -> bool:
    """Whether every file has the rows it claims, and everything that the manifest names or counts is there."""
    short = database.sql(
        "select count(*) from files full join (select run, writer, segment, count(*) as found from log group by all) counted "
        "using (run, writer, segment) where files.rows is distinct from counted.found"
    ).fetchall()[0][0]
    known = set(database.sql("select run, writer, segment, bytes from files").fetchall())
    held = Counter(dict(database.sql("select run, sum(rows)::bigint from files group by run").fetchall()))
    sealed_rows: Counter[str] = Counter()
    for sealed in manifest.sealed:
        sealed_rows[sealed.run] += sealed.rows
    return (
        short == 0
        and sealed_rows <= held
        and all(
            (sealed.run, replaced.writer, replaced.segment, replaced.bytes) in known
            for sealed in manifest.sealed
            for replaced in sealed.replaces
        )
    )


def _restore(database: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> None:
    """Fill a new database from the sealed files; what is still spooled follows by tailing."""
    database.begin()
    for sealed in manifest.sealed:
        path = str(store.root / sealed.file)
        database.execute("insert into log by name select * from read_parquet(?)", [path]).fetchall()
        for replaced in sealed.replaces:
            values = [sealed.run, replaced.writer, replaced.segment, replaced.bytes, replaced.rows, replaced.last_seq]
            database.execute("insert into files values (?, ?, ?, ?, ?, ?)", values).fetchall()
    # Files that the manifest need not name any more, because they are gone.
    database.execute(
        "insert into files select run, writer, segment, 0, count(*), max(seq) from log "
        "anti join files using (run, writer, segment) group by run, writer, segment"
    ).fetchall()
    database.commit()
