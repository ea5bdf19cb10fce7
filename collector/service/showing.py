"""Keeping store.duckdb up with the log while it grows: in a thread of the collector, beside what it seals and merges.

A merge of a million rows takes seconds, and longer on a busy machine; what people see would be as old as it takes.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

import duckdb

from unskew.collector.background import lower_priority
from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report
from unskew.collector.read.reader import Reader
from unskew.collector.service.snapshot import not_written, write_snapshot

SNAPSHOT_S = 2.0
SNAPSHOT_SHARE = 0.2
"""store.duckdb is made anew so often while there is news, less often where it would take more than this share of a core. It
takes half a second of a slow core while 10,000 events/s come in: what people see is as old as the time between two and one."""


class Showing:
    """One store's snapshots while the collector runs; as a context manager with a thread that makes them when they are due."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader: Reader | None = None
        self._shown: object = None
        self._reported = ""
        self._allowed, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="store.duckdb")

    @property
    def begun(self) -> bool:
        """Whether there was a snapshot, or an attempt at one."""
        return bool(self._shown or self._reported)

    def allow(self, *, allowed: bool) -> None:
        """While much is due there is none: people read what was, and the collector has better to do. To begin with as well."""
        if allowed:
            self._allowed.set()
        else:
            self._allowed.clear()

    def look(self) -> float:
        """Make a snapshot when there is news; how many seconds after its beginning the next one is due.

        With the open rows as a reader keeps them, which reads only what is new; it costs memory for them. What fails here is in
        nobody's way: it is reported, and the snapshot before stays.
        """
        began_s = time.thread_time()
        try:
            self._reader = self._reader or Reader(self._store, threads=1)
            self._reader.refresh()
            if self._reader.position != self._shown:
                write_snapshot(self._store, self._reader)
                self._shown = self._reader.position
        except (duckdb.Error, OSError, StoreError) as error:
            sentence = not_written(self._store, error)
            if sentence != self._reported:
                report(f"collector: {sentence}")
            self._reported = sentence
        return max(SNAPSHOT_S, (time.thread_time() - began_s) / SNAPSHOT_SHARE)

    def _follow(self) -> None:
        wait_s = 0.0
        while not self._over.wait(wait_s):
            if not self._allowed.wait(SNAPSHOT_S):
                continue
            began_s = time.monotonic()
            due_s = began_s + self.look()
            wait_s = max(0.0, due_s - time.monotonic())
            lower_priority(light=True)  # the first comes with the run: once, for a second of a core

    def __enter__(self) -> Showing:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._allowed.set()
        self._thread.join()
        if self._reader is not None:
            self._reader.close()
