"""A collector for the time of a watched command."""

from __future__ import annotations

import time

from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report
from unskew.collector.service.process import ensure_collector

COLLECTOR_S = 2.0


class KeptCollector:
    """The store's collector, started again where it has gone. Without one the spools keep everything."""

    def __init__(self, store: Store) -> None:
        self._store, self._next_s, self._problem = store, 0.0, ""

    def keep(self) -> None:
        """Now and then; one problem is reported once."""
        if time.monotonic() < self._next_s:
            return
        self._next_s, before, self._problem = time.monotonic() + COLLECTOR_S, self._problem, ""
        try:
            ensure_collector(self._store)
        except (OSError, StoreError) as error:
            self._problem = str(error)
            if self._problem != before:
                report(f"unskew: the collector cannot be started: {error}")
