"""What a reader does at each refresh, however often it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unskew.collector.events import Span
from unskew.collector.files import rows
from unskew.collector.files.segment import telemetry_line
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader, open_store
from unskew.collector.service.collecting import Collector
from unskew.collector.write.spool import SpoolWriter

A_REFRESH = 3_500
"""Lines that come within a third of a second, at 10,000 a second."""
REFRESHES = 36
"""DuckDB's own first time is the 35th."""


SPAN = Span(
    kind="F", device="node-0/gpu-1", rank=1, plan_version=0, attempt=0, iteration=7, start_us=1, wall_us=8000, compute_us=7500,
    micro_batch=0,
)  # fmt: skip


def lines(first: int, count: int) -> bytes:
    return b"".join(telemetry_line(seq, 1_700_000_000_000_000 + seq, SPAN) for seq in range(first, first + count))


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return open_store(Store(tmp_path / "store"))


@pytest.mark.slow
def test_refreshes_plan_their_statement_once_and_seldom_pack_the_open_rows(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both took most of a refresh, and packing alone was why one answer in twenty took four times as long as the median."""
    planned: list[str] = []
    rows_of_lines = rows._rows
    monkeypatch.setattr(rows, "_rows", lambda *how, **more: planned.append("") or rows_of_lines(*how, **more))
    folder = reader.store.spool("r") / "rank-0001.1"
    folder.mkdir(parents=True)
    for refresh in range(REFRESHES):
        (folder / f"{refresh * A_REFRESH:012d}.jsonl").write_bytes(lines(refresh * A_REFRESH, A_REFRESH))
        reader.refresh()
    assert reader.sql("select count(*), count(distinct seq) from spans").row(0) == (
        REFRESHES * A_REFRESH,
        REFRESHES * A_REFRESH,
    )
    assert len(planned) == 1
    packed = reader.sql("select count(*) from pragma_storage_info('hot') where compression not in ('Uncompressed', 'Constant')")
    assert packed.item() == 0


def test_a_line_that_is_no_event_keeps_no_other_out(reader: Reader) -> None:
    folder = reader.store.spool("r") / "rank-0001.1"
    folder.mkdir(parents=True)
    with (folder / f"{0:012d}.jsonl").open("wb", buffering=0) as spool:
        for first, odd in ((0, b""), (1, b'{"seq":2,"at_us":3,"type":"span@1"\n'), (3, b"{}\n")):
            spool.write(lines(first, 1) + odd)
            reader.refresh()
    assert reader.sql("select seq from spans order by seq")["seq"].to_list() == [0, 1, 3]


def test_a_refresh_that_broke_half_way_is_made_good_by_the_next(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that were sealed meanwhile had left the open ones, and no file had taken their place, for good."""
    store = Store(tmp_path / "store")
    spool = SpoolWriter(store, "r", "rank-0000")
    for _ in range(100):
        spool.append(SPAN)
    assert spool.close(10.0)
    reader.refresh()
    collector = Collector(store)
    collector.step()
    collector.close()
    with monkeypatch.context() as broken:
        broken.setattr(Reader, "_define", lambda *_: (_ for _ in ()).throw(OSError("Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            reader.refresh()
    reader.refresh()
    assert reader.sql("select count(*) as n from events")["n"][0] == 100


@pytest.mark.parametrize("done", [False, True])
def test_lines_whose_rows_could_not_be_made_come_with_the_next_refresh(
    reader: Reader, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost where the rows were not made, and not doubled where they were."""
    folder = reader.store.spool("r") / "rank-0001.1"
    folder.mkdir(parents=True)
    (folder / f"{0:012d}.jsonl").write_bytes(lines(0, 10))
    reader.refresh()
    (folder / f"{10:012d}.jsonl").write_bytes(lines(10, 10))
    insert = rows.Arriving.insert

    def breaks(arriving: rows.Arriving, *of: Any) -> None:
        if done:
            insert(arriving, *of)
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(rows.Arriving, "insert", breaks)
        with pytest.raises(MemoryError):
            reader.refresh()
    reader.refresh()
    assert reader.sql("select count(*), count(distinct seq) from spans").row(0) == (20, 20)
