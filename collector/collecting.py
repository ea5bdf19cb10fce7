"""What the collector does in a step: take what is new, seal what is final, publish what it comes to, merge what is small."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import duckdb
import msgspec

from unskew.collector import compaction, retention
from unskew.collector.commands import controller_alive
from unskew.collector.ingest import Ingest, working_database
from unskew.collector.manifest import load
from unskew.collector.paths import Store, StoreError
from unskew.collector.projecting import Projector
from unskew.collector.sealing import seal, sweep
from unskew.collector.snapshot import snapshot, write_snapshot

SEAL_S = 2.0
"""Sealing is looked into at most this often while lines come in."""
GATHER_LINES = 10_000
GATHER_S = 10.0
"""A step costs much the same however little is new, and nobody waits for it while a run goes on: lines gather up to these."""
COMPACT_S = 10.0
KEEP_REPLACED_S = 30.0
"""How long a file stays that compaction replaced."""


class Collecting:
    """One store's collecting, step by step. What it holds is made with the first step, and anew after one that failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ingest: Ingest | None = None
        self._projector: Projector | None = None
        self._next_seal_s = self._next_compact_s = 0.0
        self._stepped_s, self._gather_s = time.monotonic(), 0.0
        self._runs: list[str] = []
        self._replaced: list[tuple[float, Path]] = []

    @property
    def behind(self) -> bool:
        """Whether lines were left that are there already."""
        return self._ingest is not None and self._ingest.behind

    @property
    def gathering(self) -> bool:
        """Whether the next step can wait: the last found little, and every run that writes has its controller still."""
        waited_s = time.monotonic() - self._stepped_s
        return waited_s < self._gather_s and all(controller_alive(self._store, run) for run in self._runs)

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
        """Leave a snapshot for people."""
        if self._ingest is not None:
            write_snapshot(self._store, self._ingest)
            self._ingest.close()
        _remove([path for _, path in self._replaced])

    def _step(self) -> bool:
        if self._ingest is None or self._projector is None:
            sweep(self._store)
            self._ingest = Ingest(self._store)
            self._projector = Projector(self._store, self._ingest.database)
        ingest, projector = self._ingest, self._projector
        taken, sealed, now_s = ingest.step(), 0, time.monotonic()
        if taken:
            projector.update()
        runs = self._store.spooled_runs()
        self._gather_s = min(GATHER_S, (now_s - self._stepped_s) * GATHER_LINES / taken) if taken and not ingest.behind else 0.0
        self._stepped_s, self._runs = now_s, runs
        if not taken or now_s >= self._next_seal_s:
            self._next_seal_s = now_s + SEAL_S
            sealed = sum(seal(self._store, ingest, run) for run in runs)
        projector.publish(at_once=not taken)
        merged = not ingest.behind and self._compact(now_s, at_once=not taken, spooled=frozenset(runs))
        return bool(taken or sealed or merged) or any(controller_alive(self._store, run) for run in runs)

    def _compact(self, now_s: float, *, at_once: bool, spooled: frozenset[str]) -> bool:
        """Merge one group of small files, when it is time and one is due."""
        _remove([path for until_s, path in self._replaced if until_s <= now_s])
        self._replaced = [(until_s, path) for until_s, path in self._replaced if until_s > now_s]
        if now_s < self._next_compact_s and not at_once:
            return False
        self._next_compact_s = now_s + COMPACT_S
        assert self._ingest is not None
        manifest = load(self._store)
        ended = frozenset(one.run for one in manifest.sealed) - spooled
        for group in compaction.due(manifest, over=ended):
            replaced = compaction.merge(self._store, self._ingest.database, group)
            write_snapshot(self._store, self._ingest)  # what stands there reads files that will go
            self._replaced += [(now_s + KEEP_REPLACED_S, path) for path in replaced]
            return True
        return False

    def _abandon(self) -> None:
        """What is in memory is unsure; the next step begins where the manifest ends."""
        if self._ingest is not None:
            self._ingest.close()
        self._ingest = self._projector = None
        self._gather_s = 0.0


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
                _remove(compaction.merge(store, connection, group))
    snapshot(store)
    return before, len(load(store).sealed)


class Dropped(msgspec.Struct, frozen=True):
    """A sealed file that retention took away."""

    file: str
    rows: int
    bytes: int


def prune_older(store: Store, older_than_us: int) -> list[Dropped]:
    """Drop the telemetry that is older; for the one that maintains the store. Projections of it are published first."""
    sweep(store)
    with working_database(store) as connection:
        Projector(store, connection).publish(at_once=True)
    files = retention.due(load(store), older_than_us=older_than_us)
    dropped = [Dropped(one.file, one.rows, (store.root / one.file).stat().st_size) for one in files]
    if files:
        _remove(retention.prune(store, load(store), files))
        snapshot(store)
    return dropped
