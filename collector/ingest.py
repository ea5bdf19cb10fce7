"""The collector's database: rows and the byte offsets they came from are committed in one transaction, so a kill loses nothing.

The spool and the sealed files are the truth; a database that does not agree with itself or with the manifest (a damaged
write-ahead log can open with half its rows) is set aside and built again from them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import duckdb
import msgspec

from unskew.collector import rows
from unskew.collector.manifest import Manifest, Replaced, Sealed, load
from unskew.collector.paths import Store, StoreError
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import standing
from unskew.collector.tail import Damage, Lines, Place, Tail
from unskew.collector.views import create_views, project

_TABLES = {
    "files": "run varchar, writer varchar, segment bigint, bytes bigint, rows bigint, last_seq bigint, first_pos bigint",
    "damage": "run varchar, writer varchar, segment bigint, at_byte bigint, bytes bigint",
}
"""files: how far each spool file is taken. damage: what was passed over in them (tail.Damage)."""
_FORGET = """
delete from files where run = ? and (writer, segment) in (select (unnest(?::varchar[]), unnest(?::bigint[])))
"""
_REMEMBER = """
insert into files
select ?, unnest(?::varchar[]), unnest(?::bigint[]), unnest(?::bigint[]), unnest(?::bigint[]), unnest(?::bigint[]),
    unnest(?::bigint[])
"""
_LEAVE = """
delete from hot where run = ? and (writer, segment) in (select (unnest(?::varchar[]), unnest(?::bigint[])))
"""
SETTINGS = {"threads": 1, "memory_limit": "200MB", "preserve_insertion_order": False}
_LOCKED = "Could not set lock on file"
_SYSTEM_WORDS = frozenset(os.strerror(code) for code in errno.errorcode)


class DatabaseBusyError(StoreError):
    """Another process has the store's database open."""


class Taken(msgspec.Struct, frozen=True):
    """How far a spool file is taken; `first_pos` is the position of its first row."""

    writer: str
    segment: int
    bytes: int
    rows: int
    last_seq: int
    first_pos: int

    def replaced(self) -> Replaced:
        """The file as the manifest names it when it is sealed whole."""
        return Replaced(writer=self.writer, segment=self.segment, bytes=self.bytes, rows=self.rows, last_seq=self.last_seq)


class Ingest:
    """Takes new lines of all runs of a store into its database. For the one process that holds the collector's lock.

    A row is in table `hot` from when it is taken until the sealed file that has it is in the manifest; view `log` is both.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = load(store)
        self.database = open_database(store, manifest)
        ((last_pos,),) = self.database.sql("select coalesce(max(pos), -1) from hot").fetchall()
        self._next_pos = 1 + max([last_pos, *(one.last_pos for one in (*manifest.sealed, *manifest.pruned))])
        self._tails: dict[str, Tail] = {}
        self._files: dict[str, dict[Place, Taken]] = {}

    def step(self) -> int:
        """Take what is new, one transaction per run; returns the number of rows."""
        return sum(self._take(run) for run in self._store.spooled_runs())

    @property
    def behind(self) -> bool:
        """Whether the last step left lines that were there."""
        return any(tail.behind for tail in self._tails.values())

    def files(self, run: str) -> dict[Place, Taken]:
        """How far each spool file of `run` is taken, in the order in which they were begun."""
        if run not in self._files:
            known = self.database.execute(
                "select writer, segment, bytes, rows, last_seq, first_pos from files where run = ? order by first_pos", [run]
            ).fetchall()
            self._files[run] = {(row[0], row[1]): Taken(*row) for row in known}
        return self._files[run]

    def sealed(self, manifest: Manifest, run: str, files: Sequence[Replaced]) -> None:
        """`files` of `run` are sealed in `manifest`, which is published: their rows leave `hot`."""
        places = [run, [one.writer for one in files], [one.segment for one in files]]
        self.database.begin()
        self.database.execute(_LEAVE, places).fetchall()
        self.database.execute(_FORGET, places).fetchall()
        define_log(self.database, self._store, manifest)
        self.database.commit()
        for file in files:
            self.files(run).pop((file.writer, file.segment), None)

    def forget(self, run: str) -> None:
        """The spool files of `run` are gone."""
        self._tails.pop(run, None)
        self._files.pop(run, None)
        self.database.execute("delete from files where run = ?", [run]).fetchall()
        self.database.execute("delete from damage where run = ?", [run]).fetchall()

    def offset(self, run: str, place: Place) -> int:
        """How many bytes of a spool file are taken or passed over."""
        return self._tail(run).offsets.get(place, 0)

    def damage(self, run: str) -> list[Damage]:
        """The passages of `run` that are not what was written."""
        found = self.database.execute(
            "select distinct writer, segment, at_byte, bytes from damage where run = ? order by all", [run]
        ).fetchall()
        return [Damage(*row) for row in found]

    def resealed(self, manifest: Manifest) -> None:
        """Sealed files were replaced: view `log` stands on those of `manifest`, which is published."""
        define_log(self.database, self._store, manifest)

    def close(self) -> None:
        """Leave the database as anybody may open it."""
        define_views(self.database, self._store, load(self._store))
        self.database.execute("checkpoint").fetchall()
        self.database.close()

    def abandon(self) -> None:
        """Close without a word, after an error."""
        with contextlib.suppress(duckdb.Error):
            self.database.close()

    def _tail(self, run: str) -> Tail:
        if run not in self._tails:
            taken = {place: file.bytes for place, file in self.files(run).items()}
            sealed = {(file.writer, file.segment): file.bytes for _, file in load(self._store).replaced(run)}
            self._tails[run] = Tail(self._store, run, offsets={**taken, **sealed})
        return self._tails[run]

    def _take(self, run: str) -> int:
        tail = self._tail(run)
        found, damage = tail.poll_lines(), tail.damage
        if not found and not damage:
            return 0
        self.database.begin()
        count = rows.insert(self.database, "hot", run, found, self._next_pos)
        if count == rows.count_lines(found):
            tallies = [_tally(lines) for lines in found]
        else:
            tallies, more = self._counted(run, found)
            damage = [*damage, *more]
        fresh = _advanced(self.files(run), tallies, tail.offsets, self._next_pos)
        self._remember(run, fresh)
        for one in damage:
            self.database.execute(
                "insert into damage values (?, ?, ?, ?, ?)", [run, one.writer, one.segment, one.at_byte, one.bytes]
            ).fetchall()
        self.database.commit()
        self.files(run).update(fresh)
        self._next_pos += rows.count_lines(found)
        tail.damage.clear()
        return count

    def _counted(self, run: str, found: Sequence[Lines]) -> tuple[list[_Tally], list[Damage]]:
        """What was inserted of each file when some lines were no events, and these."""
        held = {
            (writer, segment): (count, last)
            for writer, segment, count, last in self.database.execute(
                "select writer, segment, count(*), max(seq) from hot where run = ? and pos >= ? group by all",
                [run, self._next_pos],
            ).fetchall()
        }
        written: Counter[Place] = Counter()
        for lines in found:
            written[lines.writer, lines.segment] += lines.data.count(b"\n")
        tallies = [_Tally(*place, *held.get(place, (0, -1))) for place in written]
        lost = [(place, count - held.get(place, (0, -1))[0]) for place, count in written.items()]
        return tallies, [Damage(*place, None, count) for place, count in lost if count]

    def _remember(self, run: str, fresh: Mapping[Place, Taken]) -> None:
        if not fresh:
            return
        writers, segments = zip(*fresh, strict=True)
        self.database.execute(_FORGET, [run, writers, segments]).fetchall()
        values = [[getattr(file, name) for file in fresh.values()] for name in ("bytes", "rows", "last_seq", "first_pos")]
        self.database.execute(_REMEMBER, [run, writers, segments, *values]).fetchall()


class _Tally(msgspec.Struct, frozen=True):
    """What one poll brought of a file."""

    writer: str
    segment: int
    rows: int
    last_seq: int


class _Seq(msgspec.Struct):
    seq: int


_decode_seq = msgspec.json.Decoder(_Seq).decode


def _tally(lines: Lines) -> _Tally:
    last = lines.data[lines.data.rfind(b"\n", 0, -1) + 1 :]
    return _Tally(lines.writer, lines.segment, lines.data.count(b"\n"), _decode_seq(last).seq)


def _advanced(
    files: Mapping[Place, Taken], tallies: Sequence[_Tally], offsets: Mapping[Place, int], first_pos: int
) -> dict[Place, Taken]:
    """The files that the tallies are of, as they stand with these."""
    fresh: dict[Place, Taken] = {}
    for one in tallies:
        place = (one.writer, one.segment)
        before = fresh.get(place) or files.get(place) or Taken(*place, 0, 0, -1, first_pos)
        count, last_seq = before.rows + one.rows, max(before.last_seq, one.last_seq)
        fresh[place] = Taken(*place, offsets[place], count, last_seq, before.first_pos)
    return fresh


def open_database(store: Store, manifest: Manifest) -> duckdb.DuckDBPyConnection:
    """The store's database, built again when it is damaged.

    Raises `DatabaseBusyError` when another process has it open, `StoreError` when the system refuses.
    """
    try:
        database = _connect(store)
        if _agrees(database, manifest):
            define_log(database, store, manifest)
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
    set_aside(store)
    database = _connect(store)
    define_log(database, store, manifest)
    return database


def set_aside(store: Store) -> None:
    """Put a damaged database out of the way, for whoever wants to look at it."""
    for suffix in ("", ".wal"):
        file = store.database.with_name(store.database.name + suffix)
        if file.exists():
            file.replace(file.with_name(file.name + ".damaged"))


def define_log(database: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> None:
    """View `log` over `hot` and the sealed files of `manifest`."""
    database.execute(f"create or replace view log as {_with_hot(store, manifest.sealed)}").fetchall()


def define_views(database: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> None:
    """All views, for whoever opens the database when no collector runs, on what is published as far as that goes."""
    define_log(database, store, manifest)
    create_views(database)
    now = standing(manifest)
    database.execute(f"create or replace view unprojected as {_with_hot(store, now.open)}").fetchall()
    project(database, {name: now.relation(store, name) for name in PROJECTIONS if now.tiers}, "unprojected")


def _with_hot(store: Store, sealed: Sequence[Sealed]) -> str:
    files = ", ".join(rows.quoted(str(store.root / one.file)) for one in sealed)
    more = f" union all by name select * from read_parquet([{files}], union_by_name = true)" if files else ""
    return f"select * from hot{more}"


def _connect(store: Store) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(str(store.database), config=SETTINGS)
    rows.create_table(database, "hot")
    for table, columns in _TABLES.items():
        database.execute(f"create table if not exists {table} ({columns})").fetchall()
    return database


def _agrees(database: duckdb.DuckDBPyConnection, manifest: Manifest) -> bool:
    """Whether every spool file not yet sealed has the rows it claims, without those that a killed collector had sealed."""
    ((tables,),) = database.sql("select count(*) from duckdb_tables() where table_name = 'log'").fetchall()
    if tables:  # from before sealed rows left the database
        return False
    replaced = [(one.run, file.writer, file.segment) for one in manifest.sealed for file in one.replaces]
    places = [[place[column] for place in replaced] for column in range(3)]
    for table in ("hot", "files"):
        database.execute(
            f"delete from {table} where (run, writer, segment) in "
            "(select (unnest(?::varchar[]), unnest(?::varchar[]), unnest(?::bigint[])))",
            places,
        ).fetchall()
    ((wrong,),) = database.sql(
        "select count(*) from files full join (select run, writer, segment, count(*) as found from hot group by all) counted "
        "using (run, writer, segment) where coalesce(files.rows, 0) != coalesce(counted.found, 0)"
    ).fetchall()
    return bool(wrong == 0)
