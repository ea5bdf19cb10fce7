"""Two stores that keep the contract: ours, and a plain SQLite file, which proves that the contract asks for no spool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.store.sqlite_store import SPAN_FIELDS, SqliteStore
from support.store.store_contract import Backend, StoreContract, Stream

from unskew.collector.events import Control, Event, Span, Telemetry
from unskew.collector.files.tail import decode_event
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.service.collecting import Collector
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter


class SpoolAndCollector:
    """Ours: spool files, taken by the collector's code."""

    refused: type[Exception] = StoreError

    def __init__(self, folder: Path) -> None:
        self._store = Store(folder)
        self._writers: dict[str, SpoolWriter] = {}

    def write(self, writer: str, events: Sequence[Telemetry]) -> None:
        if writer not in self._writers:
            self._writers[writer] = SpoolWriter(self._store, "r", writer)
        for event in events:
            self._writers[writer].append(event)
        assert self._writers[writer].hand_over(30.0)

    def stream(self, stream: str) -> Stream:
        return _OpenedForEachAppend(self._store, stream)

    def replay(self) -> None:
        """Each look at the store is by a new collector, which remembers nothing: that of `_read` takes all of it again."""

    def events(self, writer: str) -> list[tuple[int, Event]]:
        return self._read(f"select seq, payload from events where writer = '{writer}' order by seq")

    def versions(self, stream: str) -> list[tuple[int, Event]]:
        return self._read(f"select version, payload from events where stream = '{stream}' order by version")

    def _read(self, query: str) -> list[tuple[int, Event]]:
        collecting = Collector(self._store)
        while collecting.step():
            pass
        collecting.close()
        with open_store(self._store) as reader:
            return [(number, _event(payload)) for number, payload in reader.sql(query).rows()]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _OpenedForEachAppend:
    """A stream has one writer at a time; here each append is one."""

    def __init__(self, store: Store, stream: str) -> None:
        self._store, self._stream = store, stream

    def append(self, expected_version: int, events: Sequence[Control], *, actor: str) -> int:
        with contextlib.closing(ControlStream(self._store, "r", self._stream, "controller.1")) as stream:
            return stream.append(expected_version, events, actor=actor)


class Sqlite:
    """A file of SQLite."""

    refused: type[Exception] = StoreError

    def __init__(self, path: Path) -> None:
        self._path = path
        SqliteStore(path).close()  # the first opening makes the file, which several at once may not
        self._written: list[tuple[str, int, list[Telemetry]]] = []
        self._next: dict[str, int] = {}

    def write(self, writer: str, events: Sequence[Telemetry]) -> None:
        first = self._next.get(writer, 0)
        self._next[writer] = first + len(events)
        self._written.append((writer, first, list(events)))
        self._hand_over(writer, first, events)

    def _hand_over(self, writer: str, first: int, events: Sequence[Telemetry]) -> None:
        with contextlib.closing(SqliteStore(self._path)) as store:
            store.write(writer, first, [(1, event) for event in events])

    def stream(self, stream: str) -> Stream:
        return _SqliteStream(self._path, stream)

    def replay(self) -> None:
        for writer, first, events in self._written:
            self._hand_over(writer, first, events)

    def events(self, writer: str) -> list[tuple[int, Event]]:
        columns = ", ".join(f'"{name}"' for name in SPAN_FIELDS)
        query = f"select seq, {columns} from events where writer = '{writer}' order by seq"
        with contextlib.closing(SqliteStore(self._path)) as store:
            return [
                (seq, msgspec.convert(dict(zip(SPAN_FIELDS, fields, strict=True)) | {"type": "span@1"}, Span))
                for seq, *fields in store.query(query)
            ]

    def versions(self, stream: str) -> list[tuple[int, Event]]:
        query = f"select version, payload from control where stream = '{stream}' order by version"
        with contextlib.closing(SqliteStore(self._path)) as store:
            return [(version, _event(str(payload))) for version, payload in store.query(query)]

    def close(self) -> None:
        pass


class _SqliteStream:
    def __init__(self, path: Path, stream: str) -> None:
        self._path, self._stream = path, stream

    def append(self, expected_version: int, events: Sequence[Control], *, actor: str) -> int:
        with contextlib.closing(SqliteStore(self._path)) as store:
            return store.append(self._stream, expected_version, events, actor=actor)


def _event(line: str) -> Event:
    event = decode_event(line.encode())
    assert event is not None
    return event


class TestSpoolAndCollector(StoreContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        with contextlib.closing(SpoolAndCollector(tmp_path / "store")) as backend:
            yield backend


class TestSqlite(StoreContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        with contextlib.closing(Sqlite(tmp_path / "store.sqlite")) as backend:
            yield backend
