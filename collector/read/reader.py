"""Reading a store without a lock and without a server: an own in-memory DuckDB over sealed Parquet and the open spool files.

It sees everything that was handed to the kernel, whether a collector runs or not. Each refresh reads only what is new.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import msgspec

from unskew.collector.events import CONTROL, tag_of
from unskew.collector.files import rows
from unskew.collector.files.damage import DamagedError, naming_damage
from unskew.collector.files.manifest import Manifest, SealedFile, load
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store, StoreError
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import PublishedState, parquet, published_state
from unskew.collector.read.on_demand import ViewsOnDemand
from unskew.collector.read.outcomes import SET_HELD
from unskew.collector.read.views import VIEWS, events_of
from unskew.collector.write.commands import controller_alive

if TYPE_CHECKING:
    import polars
    import pyarrow  # type: ignore[import-untyped]  # it ships no types

_ATTEMPTS = 20
_WIDER = 16
_PACKED_EVERY = "64MB"
"""Of new rows: DuckDB then packs the open ones, in 0.2 s of some refresh, and gives back the memory of deleted ones. Its own
16 MB is up to one refresh in 17 while 10,000 events/s come in; this takes 50 MB more."""
_SEALED, _UNPROJECTED = "sealed", "unprojected"
_ALL_OF = "select * from read_parquet(getvariable('{}_files'))"
CONTROL_TAGS = frozenset(map(tag_of, CONTROL))
Relation = duckdb.DuckDBPyRelation
Params = Sequence[Any] | Mapping[str, Any] | None


class ReaderSources(msgspec.Struct, frozen=True):
    """`hot`: rows of the open spool files; `held`: runs that a living controller holds; paths of sealed files, in the
    projections already or not; of projections by name."""

    hot: pyarrow.Table
    held: list[str]
    sealed: list[str]
    unprojected: list[str]
    published: dict[str, list[str]]


class Reader:
    """The views of docs/reference/sql.md over one store, as of the last `refresh`. Not for use by two threads at once."""

    def __init__(self, store: Store, *, threads: int | None = None) -> None:
        """`threads`: of queries at most (default: one per core)."""
        self._store = store
        self._connection = duckdb.connect(":memory:", config={} if threads is None else {"threads": threads})
        self._connection.execute("set parquet_metadata_cache = true").fetchall()
        self._connection.execute(f"set checkpoint_threshold = '{_PACKED_EVERY}'").fetchall()
        rows.create_table(self._connection, "hot")
        self._connection.execute("create view log as select * from hot").fetchall()
        self._views = ViewsOnDemand(self._connection)
        self._tails: dict[str, Tail] = {}
        self._manifest = Manifest(number=-1)
        self._files: dict[str, list[str]] = {}
        self._arriving: rows.Arriving | None = None
        self._reading: str | None = None
        self._held: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since. Raises `StoreError` when the store cannot be read.

        The manifest is read before and after the spool files: unchanged, no file was replaced (and removed) in between, so each
        row was seen in exactly one form.
        """
        for _ in range(_ATTEMPTS):
            manifest = load(self._store)
            if manifest.number != self._manifest.number:
                try:
                    with naming_damage():
                        self._turn(manifest)
                except BaseException:
                    self._manifest = Manifest(number=-1)  # half-way: the next refresh goes over to it again
                    raise
            self._read_spool()
            if load(self._store).number == manifest.number:
                return
        raise StoreError(f"{self._store.manifest} changed {_ATTEMPTS} times while it was read")

    def sql(self, query: str, params: Params = None) -> polars.DataFrame:
        """The answer to one query over the views, or a whole view by its name, as a Polars frame.

        Raises `duckdb.Error` for a wrong one, `StoreError` for a file that cannot be read. Trusted callers only (people:
        console.py).
        """
        frame: polars.DataFrame = self._answer(query, params, lambda relation: relation.pl())
        return frame

    def arrow(self, query: str, params: Params = None) -> pyarrow.Table:
        """As `sql`, an Arrow table."""
        return self._answer(query, params, lambda relation: relation.to_arrow_table())

    def duckdb(self, query: str, params: Params = None) -> Relation:
        """As `sql`, a DuckDB relation: nothing is read before its rows are asked for, and it can be queried on.

        It reads the files of the last `refresh`; ask for its rows before the next.
        """
        self._views.define_all()  # the relation may be asked about any view
        relation: Relation = self._answer(query, params, lambda relation: relation)
        return relation

    def newest(self, count: int, run: str | None = None, types: Sequence[str] | None = None) -> polars.DataFrame:
        """The `count` newest events (of `run`, of these types), newest first: the columns of `events`.

        Sealed files are read from the newest on, as long as they may hold anything newer than what is found: one or two,
        however many there are.
        """
        import polars  # noqa: PLC0415 - who does not ask need not load it

        conditions = {"run = ?": run, "list_contains(?, type)": None if types is None else list(types)}
        asked = {condition: value for condition, value in conditions.items() if value is not None}
        control = types is not None and CONTROL_TAGS.issuperset(types)
        sealed = [one for one in self._manifest.sealed if run in {None, one.run} and not (control and one.kind == "telemetry")]
        sealed.sort(key=lambda one: inf if one.last_at_us is None else one.last_at_us, reverse=True)
        found = self._newest_of("hot", count, asked)
        for one in sealed:
            since_us = found["at_us"][-1] if found.height == count else 0
            if one.last_at_us is not None and one.last_at_us < since_us:
                break
            rows = self._newest_in(one, count, asked, since_us)
            found = polars.concat([found, rows]).sort("at_us", "seq", descending=True).head(count)
        return found

    @property
    def store(self) -> Store:
        """What it reads."""
        return self._store

    @property
    def manifest(self) -> Manifest:
        """The one of the last `refresh`."""
        return self._manifest

    @property
    def position(self) -> object:
        """How far it has read: the same as long as there is nothing new."""
        return self._manifest.number, {run: dict(tail.offsets) for run, tail in self._tails.items()}

    def runs(self) -> polars.DataFrame:
        """The runs of the store, newest first."""
        return self.sql("select * from runs order by started_us desc")

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong in the log, one sentence each: by the collector's account, and what was passed over since."""
        passed_over = (one.sentence(run) for run, tail in self._tails.items() for one in tail.damage)
        return tuple(dict.fromkeys((*self._manifest.problems, *passed_over)))

    def sources(self) -> ReaderSources:
        """What the views read, for another connection."""
        now = published_state(self._manifest)
        return ReaderSources(
            hot=self._connection.sql("select * from hot").to_arrow_table(),
            held=self._held,
            sealed=[str(self._store.root / one.file) for one in self._manifest.sealed if one not in now.open],
            unprojected=[str(self._store.root / one.file) for one in now.open],
            published={
                name: [str(self._store.root / tier.entries[name].file) for tier in now.tiers]
                for name in PROJECTIONS
                if now.tiers
            },
        )

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _newest_in(self, one: SealedFile, count: int, asked: dict[str, Any], since_us: int) -> polars.DataFrame:
        """The newest of a sealed file, not older than `since_us`: from a window at its end that grows until it holds enough."""
        source = parquet(self._store, [one.file])
        if one.first_at_us is None or one.last_at_us is None:
            return self._newest_of(source, count, asked, since_us)
        oldest_us = max(one.first_at_us, since_us)
        window_us = 2 * count * (one.last_at_us - one.first_at_us) // one.rows + 1
        while True:
            from_us = max(oldest_us, one.last_at_us - window_us)
            found = self._newest_of(source, count, asked, from_us)
            if found.height == count or from_us == oldest_us:
                return found
            window_us *= _WIDER

    def _newest_of(self, source: str, count: int, asked: dict[str, Any], from_us: int = 0) -> polars.DataFrame:
        where, order = " and ".join((f"at_us >= {from_us}", *asked)), "order by at_us desc, seq desc"
        # The lines are put together from columns after the choice.
        return self.sql(
            f"{events_of(f'(select * from {source} where {where} {order} limit {count})')} {order}", list(asked.values())
        )

    def _answer(self, query: str, params: Params, take: Callable[[Relation], Any]) -> Any:
        query = f"from {query}" if query in VIEWS else query
        try:
            with naming_damage():
                return take(self._views.sql(query, params))
        except (duckdb.IOException, DamagedError):  # a file was replaced since the refresh
            self._manifest = Manifest(number=-1)
            self.refresh()
            with naming_damage():
                return take(self._views.sql(query, params))

    def _turn(self, manifest: Manifest) -> None:
        """Go over to a new manifest: forget the open rows that are sealed now, read on where the others ended."""
        self._manifest, spooled = manifest, self._store.spooled_runs()
        for run in spooled:
            if run in self._tails:
                self._tails[run].skip = {(one.writer, one.segment) for _, one in manifest.replaced(run)}
        gone = [
            (run, *place)
            for run, tail in self._tails.items()
            for place in tail.offsets
            if run not in spooled or place in tail.skip
        ]
        self._tails = {run: tail for run, tail in self._tails.items() if run in spooled}
        if gone:
            self._leave(gone)
        self._define(published_state(manifest))

    def _leave(self, gone: Sequence[tuple[str, str, int]]) -> None:
        """The rows of these spool files leave `hot`."""
        # DuckDB 2.0 gives the memory of deleted rows back by itself; making the table anew takes ten times as long.
        self._connection.execute(
            "delete from hot where (run, writer, segment) in "
            "(select (unnest(?::varchar[]), unnest(?::varchar[]), unnest(?::bigint[])))",
            [[one[column] for one in gone] for column in range(3)],
        ).fetchall()
        for run, writer, segment in gone:
            if run in self._tails:
                del self._tails[run].offsets[writer, segment]

    def _define(self, now: PublishedState) -> None:
        """The files that the views read. They are variables, because defining a view opens its files."""
        files = {_SEALED: [one.file for one in self._manifest.sealed], _UNPROJECTED: [one.file for one in now.open]}
        files |= {name: [tier.entries[name].file for tier in now.tiers] for name in PROJECTIONS}
        for name, listed in files.items():
            if listed != self._files.get(name):
                paths = ", ".join(rows.quoted(str(self._store.root / file)) for file in listed)
                self._connection.execute(f"set variable {name}_files = [{paths}]").fetchall()
        there = {name for name, listed in files.items() if listed}
        if not self._files or there != {name for name, listed in self._files.items() if listed}:
            for view, name in (("log", _SEALED), (_UNPROJECTED, _UNPROJECTED)):
                more = f" union all by name {_ALL_OF.format(name)}" if name in there else ""
                self._connection.execute(f"create or replace view {view} as select * from hot{more}").fetchall()
            published = {name: _ALL_OF.format(name) for name in PROJECTIONS if name in there}
            self._views.project(published, _UNPROJECTED)
        self._files = files

    def _read_spool(self) -> None:
        if self._reading is not None:  # its lines were taken and may not have become rows: it is read from its beginning again
            half_read = self._tails.pop(self._reading, None)
            self._leave([(self._reading, *place) for place in (half_read.offsets if half_read else ())])
        held = []
        for run in self._store.spooled_runs():
            if controller_alive(self._store, run):  # asked first: a controller logs the end before it lets go
                held.append(run)
            self._reading = run
            if run not in self._tails:
                skip = {(replaced.writer, replaced.segment) for _, replaced in self._manifest.replaced(run)}
                self._tails[run] = Tail(self._store, run, skip=skip)
            tail = self._tails[run]
            tail.behind = True
            while tail.behind:
                found = tail.poll_lines()
                if tail.behind:
                    rows.insert(self._connection, "hot", run, found)  # a backlog would take much memory with its lines
                elif found:
                    self._arriving = self._arriving or rows.Arriving(self._connection, "hot")
                    self._arriving.insert(self._connection, run, found)
        self._reading = None
        if held != self._held:
            self._connection.execute(SET_HELD, [held]).fetchall()
            self._held = held


def open_store(store: Store | str | os.PathLike[str] | None = None) -> Reader:
    """A reader of a store (default: $UNSKEW_STORE, else ./data/store). Raises `StoreError` for a bad path."""
    return Reader(store if isinstance(store, Store) else Store.locate(store))
