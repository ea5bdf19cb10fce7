"""Following a run through the store: what is sealed already, then what comes; for whoever is not the run's own controller."""

from __future__ import annotations

import heapq
import time
from types import TracebackType

from unskew.collector.events import CONTROL, Dropped, Event, IterationCommitted, IterationJudged, tag_of
from unskew.collector.files.tail import Entry, decode_event
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

TYPES: tuple[type[Event], ...] = (*CONTROL, IterationCommitted, IterationJudged, Dropped)

_QUERY = """
select writer, seq, at_us, stream, version, actor, payload::varchar as payload
from events left join (select unnest(?::varchar[]) as writer, unnest(?::bigint[]) as seen) using (writer)
where run = ? and list_contains(?, type) and seq > coalesce(seen, -1) order by writer, seq"""


class LogFollower:
    """The entries of `run` that make up its story (no spans). A context manager."""

    def __init__(self, store: Store, run: str) -> None:
        self._reader, self._run = open_store(store), run
        self._tags = [tag_of(kind) for kind in TYPES]
        self._seen: dict[str, int] = {}
        self.age_s = 0.0
        """How long ago something was written to the run's log."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What the collector found wrong in the run's log, one sentence each."""
        return tuple(problem for problem in self._reader.problems if problem.startswith(f"run {self._run}: "))

    def poll(self) -> list[Entry]:
        """The entries since the last poll: each writer's in its own order, the writers merged by wall clock."""
        self._reader.refresh()
        last_us = self._reader.sql("select max(last_us) as last_us from writers where run = ?", [self._run])["last_us"][0]
        self.age_s = 0.0 if last_us is None else max(0.0, time.time() - last_us / 1e6)
        rows = self._reader.sql(_QUERY, [list(self._seen), list(self._seen.values()), self._run, self._tags])
        entries: dict[str, list[Entry]] = {}
        for writer, seq, at_us, stream, version, actor, payload in rows.iter_rows():
            self._seen[writer] = seq
            raw = payload.encode()
            entry = Entry(writer, 0, seq, at_us, stream, version, actor, decode_event(raw), raw)
            entries.setdefault(writer, []).append(entry)
        return list(heapq.merge(*entries.values(), key=lambda entry: entry.at_us))

    def __enter__(self) -> LogFollower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._reader.close()
