"""Reading a store without a lock and without a server: an own in-memory DuckDB over sealed Parquet and the open spool files.

It sees everything that was handed to the kernel, whether a collector runs or not. Each refresh reads only what is new.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb

from unskew.collector import rows
from unskew.collector.manifest import Manifest, load
from unskew.collector.paths import Store, StoreError
from unskew.collector.tail import Tail
from unskew.collector.views import create_views

if TYPE_CHECKING:
    import polars
    import pyarrow  # type: ignore[import-untyped]  # it ships no types

_ATTEMPTS = 20


class Reader:
    """The views of docs/events.md over one store, as of the last `refresh`. Not for use by two threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection = duckdb.connect(":memory:")
        rows.create_table(self._connection, "hot")
        self._tails: dict[str, Tail] = {}
        self._manifest = Manifest(number=-1)
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since. Raises `StoreError` when the store cannot be read.

        The manifest is read before and after the spool files: unchanged, no file was replaced (and removed) in between, so each
        row was seen in exactly one form.
        """
        for _ in range(_ATTEMPTS):
            manifest = load(self._store)
            if manifest.number != self._manifest.number:
                self._restart(manifest)
            self._read_spool()
            if load(self._store).number == manifest.number:
                return
        raise StoreError(f"{self._store.manifest} changed {_ATTEMPTS} times while it was read")

    def sql(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> polars.DataFrame:
        """Run one query over the views. Raises `duckdb.Error` for a wrong one; trusted callers only (people: console.py)."""
        try:
            return self._frame(query, params)
        except duckdb.IOException:  # a sealed file was replaced since the refresh
            self._manifest = Manifest(number=-1)
            self.refresh()
            return self._frame(query, params)

    def runs(self) -> polars.DataFrame:
        """The runs of the store, newest first."""
        return self.sql("select * from runs order by started_us desc")

    @property
    def problems(self) -> tuple[str, ...]:
        """What the collector found wrong in the log, one sentence each."""
        return self._manifest.problems

    def sources(self) -> tuple[list[str], pyarrow.Table]:
        """What the views stand on: paths of the sealed files, and the rows of the open spool files."""
        return self._sealed_files(), self._connection.sql("select * from hot").to_arrow_table()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _frame(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None) -> polars.DataFrame:
        frame: polars.DataFrame = self._connection.sql(query, params=params).pl()
        return frame

    def _restart(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tails.clear()
        self._connection.execute("delete from hot").fetchall()
        files = self._sealed_files()
        paths = ", ".join(rows.quoted(file) for file in files)
        sealed = f" union all by name select * from read_parquet([{paths}])" if files else ""
        self._connection.execute(f"create or replace view log as select * from hot{sealed}").fetchall()
        create_views(self._connection)

    def _sealed_files(self) -> list[str]:
        return [str(self._store.root / sealed.file) for sealed in self._manifest.sealed]

    def _read_spool(self) -> None:
        for run in self._store.spooled_runs():
            if run not in self._tails:
                skip = {(replaced.writer, replaced.segment) for _, replaced in self._manifest.replaced(run)}
                self._tails[run] = Tail(self._store, run, skip=skip)
            tail = self._tails[run]
            tail.behind = True
            while tail.behind:
                rows.insert(self._connection, "hot", run, tail.poll())


def open_store(store: Store | str | os.PathLike[str] | None = None) -> Reader:
    """A reader of a store (default: $UNSKEW_STORE, else ./data/store). Raises `StoreError` for a bad path."""
    return Reader(store if isinstance(store, Store) else Store.locate(store))
