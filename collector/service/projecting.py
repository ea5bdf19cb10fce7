"""Keeping the projections up beside the log: called by the collector, and never in the way of ingest.

A projection that fails is reported in collector.log and left as it was; the log goes on, and readers aggregate what it lacks.
"""

from __future__ import annotations

import time
from pathlib import Path

import duckdb
import msgspec

from unskew.collector import projections
from unskew.collector.files import manifest
from unskew.collector.paths import Store
from unskew.collector.process_log import report

PUBLISH_S = 5.0
"""At most this often while there is news; once more when the collector becomes idle."""


class Projector:
    """Calls the projections of one database."""

    def __init__(self, store: Store, database: duckdb.DuckDBPyConnection) -> None:
        self._store, self._database = store, database
        self._next_publish_s = 0.0
        self._published = -1
        self._reported = ""

    def publish(self, *, at_once: bool = False) -> list[Path]:
        """Put what is sealed into published files, when there is news and it is time; then swap the manifest.

        The files that it names no more are returned, to be removed: readers may be on their way to them.
        """
        now_s, current = time.monotonic(), manifest.load(self._store)
        if current.number == self._published or (now_s < self._next_publish_s and not at_once):
            return []
        self._next_publish_s = now_s + PUBLISH_S
        try:
            published = projections.publish(self._database, self._store, current)
        except (duckdb.Error, ValueError, OSError) as error:
            self._report(f"projections were not published: {error}")
            return []
        replaced = [self._store.root / one.file for one in current.published if one not in published]
        if published != current.published:
            current = msgspec.structs.replace(current, number=current.number + 1, published=published)
            manifest.publish(self._store, current)
        self._published = current.number
        return replaced

    def _report(self, sentence: str) -> None:
        if sentence != self._reported:
            report(f"collector: {sentence}")
        self._reported = sentence
