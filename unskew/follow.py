"""Following a run through the store: what is sealed already, then what comes; for whoever is not the run's own controller."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import TracebackType

import msgspec

from unskew.collector.events import CONTROL, Dropped, Event, IterationCommitted, IterationJudged, tag_of
from unskew.collector.paths import Store
from unskew.collector.reader import open_store
from unskew.collector.tail import Entry

TYPES: tuple[type[Event], ...] = (*CONTROL, IterationCommitted, IterationJudged, Dropped)
LATE_US = 10_000_000
"""A writer may be this late behind another one."""

_QUERY = """
select writer, seq, at_us, stream, version, actor, payload::varchar as payload from events
where run = ? and at_us >= ? and list_contains(?, type) order by at_us, writer, seq"""


class Follow:
    """The entries of `run` that tell its story (no spans), by wall clock. A context manager."""

    def __init__(self, store: Store, run: str) -> None:
        self._reader, self._run = open_store(store), run
        self._decode = msgspec.json.Decoder(reduce(or_, TYPES)).decode
        self._tags = [tag_of(kind) for kind in TYPES]
        self._seen: dict[str, int] = {}
        self._since_us = 0

    def poll(self) -> list[Entry]:
        """The entries since the last poll."""
        self._reader.refresh()
        rows = self._reader.sql(_QUERY, [self._run, self._since_us - LATE_US, self._tags])
        entries = []
        for writer, seq, at_us, stream, version, actor, payload in rows.iter_rows():
            if seq > self._seen.get(writer, -1):
                self._seen[writer], self._since_us = seq, at_us
                raw = payload.encode()
                entries.append(Entry(writer, 0, seq, at_us, stream, version, actor, self._decode(raw), raw))
        return entries

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._reader.close()
