"""What the collector does in a step: seal what is final, publish its aggregates, merge what is small."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb
import msgspec

from unskew.collector.files.manifest import load
from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report
from unskew.collector.service import compaction, retention
from unskew.collector.service.ingest import working_database
from unskew.collector.service.projecting import Projector
from unskew.collector.service.sealing import seal_next, sweep
from unskew.collector.service.snapshot import files_read, not_written, write_snapshot
from unskew.collector.write.commands import living_runs

COMPACT_S = 10.0
KEEP_REPLACED_S = 600.0
"""How long a file stays that another replaced: for readers on their way, and for people who hold store.duckdb open."""
CATCHING_UP_THREADS = 2


class Collector:
    """One store's collecting, step by step. What it holds is made with the first step, and anew after one that failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._database: duckdb.DuckDBPyConnection | None = None
        self._projector: Projector | None = None
        self._next_compact_s = 0.0
        self._unsealed_bytes: dict[str, int] = {}
        self._replaced: list[tuple[float, Path]] = []
        self.behind = False
        """Whether the last step left something that is due."""

    def step(self) -> bool:
        """Whether there was anything to do, or there may be soon. Raises `StoreError` when the store cannot be written now."""
        try:
            return self._step()
        except (duckdb.Error, OSError) as error:
            self._abandon()
            raise StoreError(f"cannot go on with {self._store.root}: {str(error).partition(chr(10))[0]}") from error
        except StoreError:
            self._abandon()
            raise

    def close(self) -> None:
        """Leave a snapshot for people, unless much is due still: the next collector goes on with that and leaves one.

        And no file that nobody names any more, be it that a killed collector replaced it and store.duckdb read it until now.
        """
        if self._database is None:
            return
        if not self.behind:
            self._write_snapshot()
        self._abandon()
        try:
            sweep(self._store)
        except (OSError, StoreError) as error:
            report(f"collector: {error}")

    def _step(self) -> bool:
        if self._database is None or self._projector is None:
            sweep(self._store)
            self._database = working_database(self._store)
            self._projector = Projector(self._store, self._database)
        runs = self._store.spooled_runs()
        done = {run: seal_next(self._store, self._database, run) for run in runs}
        sealed = sum(one.rows for one in done.values())
        unsealed_bytes = {run: one.unsealed_bytes for run, one in done.items()}
        news, self._unsealed_bytes = sealed > 0 or unsealed_bytes != self._unsealed_bytes, unsealed_bytes
        self._hurry(any(one.due_bytes for one in done.values()))
        self._keep_replaced(self._projector.publish(at_once=not self.behind))
        merged = not self.behind and self._compact(time.monotonic(), at_once=not sealed, spooled=frozenset(runs))
        return news or merged or bool(living_runs(self._store))  # of one that has begun nothing may be in the log yet

    def _hurry(self, behind: bool) -> None:
        """While it lags the collector takes a second core, because what is not sealed slows readers; else one at most."""
        if behind != self.behind:
            assert self._database is not None
            threads = min(CATCHING_UP_THREADS, len(os.sched_getaffinity(0))) if behind else 1
            self._database.execute(f"set threads = {threads}").fetchall()
        self.behind = behind

    def _compact(self, now_s: float, *, at_once: bool, spooled: frozenset[str]) -> bool:
        """Merge one group of small files, when it is time and one is due."""
        self._remove_replaced(now_s)
        if now_s < self._next_compact_s and not at_once:
            return False
        self._next_compact_s = now_s + COMPACT_S
        assert self._database is not None
        manifest = load(self._store)
        ended = frozenset(one.run for one in manifest.sealed) - spooled
        for group in compaction.due(manifest, over=ended):
            self._keep_replaced(compaction.merge(self._store, self._database, group))
            return True
        return False

    def _keep_replaced(self, paths: Sequence[Path]) -> None:
        self._replaced += [(time.monotonic() + KEEP_REPLACED_S, path) for path in paths]

    def _remove_replaced(self, now_s: float) -> None:
        """Remove what was replaced long enough ago, but what store.duckdb reads."""
        due = [path for until_s, path in self._replaced if until_s <= now_s]
        read = files_read(self._store) if due else None
        if read is not None:
            gone = [path for path in due if str(path.relative_to(self._store.root)) not in read]
            _remove(gone)
            self._replaced = [(until_s, path) for until_s, path in self._replaced if path not in gone]

    def _write_snapshot(self) -> None:
        """What fails here is in nobody's way: it is reported, and the one before stays."""
        try:
            write_snapshot(self._store)
        except (duckdb.Error, OSError, StoreError) as error:
            report(f"collector: {not_written(self._store, error)}")

    def _abandon(self) -> None:
        """Work that failed is unsure; the next step begins where the manifest ends."""
        if self._database is not None:
            self._database.close()
            shutil.rmtree(self._store.spill, ignore_errors=True)
        self._database = self._projector = None
        self.behind = False


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def compact_all(store: Store) -> tuple[int, int]:
    """Merge what is small in the runs that are over; for the one that maintains the store. Sealed files before and after."""
    sweep(store)
    before, ended = len(load(store).sealed), frozenset(one.run for one in load(store).sealed) - {*store.spooled_runs()}
    with working_database(store) as connection:
        Projector(store, connection).publish(at_once=True)
        while groups := list(compaction.due(load(store), over=ended)):
            for group in groups:
                compaction.merge(store, connection, group)
    write_snapshot(store)
    sweep(store)  # what it read before, also where a process was killed
    return before, len(load(store).sealed)


class DroppedFile(msgspec.Struct, frozen=True):
    """A sealed file that retention took away."""

    file: str
    rows: int
    bytes: int


def prune_older(store: Store, older_than_us: int) -> list[DroppedFile]:
    """Drop the telemetry that is older; for the one that maintains the store. Projections of it are published first."""
    sweep(store)
    with working_database(store) as connection:
        Projector(store, connection).publish(at_once=True)
    manifest = load(store)
    if manifest.sealed and not manifest.published:
        raise StoreError(f"nothing was dropped from {store.root}: its aggregates could not be published before")
    files = retention.due(manifest, older_than_us=older_than_us)
    dropped = [DroppedFile(one.file, one.rows, (store.root / one.file).stat().st_size) for one in files]
    if files:
        try:
            replaced = retention.prune(store, manifest, files)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            # Room for a manifest: the disk may be full because nothing was dropped. The database is made anew below.
            _remove([store.database, store.database.with_suffix(".new")])
            replaced = retention.prune(store, manifest, files)
        _remove(replaced)
        try:
            write_snapshot(store)
        except (duckdb.Error, OSError):  # the next collector leaves one; the one before reads files that are gone
            _remove([store.database])
        sweep(store)
    return dropped
