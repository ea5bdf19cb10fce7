"""A store with spans, decisions and a collector that has caught up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from unskew.collector.events import HostClock, Note, Span
from unskew.collector.paths import Store
from unskew.collector.service.collecting import Collector
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter


def fill(store: Store, run: str, writer: str, count: int) -> None:
    spool = SpoolWriter(store, run, writer)
    for number in range(count):
        spool.append(
            Span(kind="B", device="d", rank=1, plan_version=0, attempt=0, iteration=number // 9, start_us=number, wall_us=7)
        )
        if number % 40 == 39:
            assert spool.hand_over(30.0)
    spool.append(HostClock(node="n", offset_us=2, within_us=1))
    assert spool.close(30.0)


def decide(store: Store, run: str, writer: str) -> None:
    stream = ControlStream(store, run, "control", writer)
    for number in range(3):
        stream.append(stream.version, [Note(text=f"{writer} {number}", by="ada")], actor="controller")
    stream.close()


def collect(store: Store) -> None:
    collecting = Collector(store)
    while collecting.step():
        pass
    collecting.close()


@contextmanager
def opened(store: Store) -> Iterator[duckdb.DuckDBPyConnection]:
    """store.duckdb as somebody opens it who is elsewhere."""
    with duckdb.connect(str(store.database), read_only=True) as database:
        database.execute("set variable store = ?", [str(store.root)]).fetchall()
        yield database
