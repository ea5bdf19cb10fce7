"""The collector as a process when the disk refuses, and what it knows of hosts' clocks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unskew.collector.events import HostClock, Span
from unskew.collector.locks import is_held
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.service import process
from unskew.collector.service.process import KeptCollector, trouble
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.node.agent import _compared

FULL_DISK = """if True:
    import sys
    from unskew.collector.service import sealing, process as service
    from unskew.collector.paths import Store
    write = sealing.write_sorted
    def refuse(database, source, path):
        if (path.parents[2] / "full").exists():
            raise OSError(28, "No space left on device")
        return write(database, source, path)
    sealing.write_sorted = refuse
    service.BUSY_RETRY_S = 0.2
    sys.exit(service.main(sys.argv[1:]))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def spool_spans(store: Store, writer: str) -> None:
    spool = SpoolWriter(store, "r", writer)
    for number in range(100):
        spool.append(
            Span(kind="F", device="d", rank=0, plan_version=0, attempt=0, iteration=number, start_us=number, wall_us=1)
        )
    assert spool.close(30.0)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_full_disk_costs_no_event_and_is_told_while_it_lasts(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    spool_spans(store, "rank-0000.1")
    (store.root / "full").touch()
    command = [sys.executable, "-c", FULL_DISK, "--store", str(store.root), "--idle-s", "30"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as collector:
        wait_for(lambda: trouble(store) is not None)
        assert "No space left on device" in (trouble(store) or "")
        spool_spans(store, "rank-0001.1")
        with open_store(store) as reader:
            assert reader.sql("select count(*) from events").item() == 200, "readers need no room"
        (store.root / "full").unlink()
        wait_for(lambda: not store.spooled_runs())
        wait_for(lambda: trouble(store) is None)
        collector.terminate()
        assert collector.wait() == 0
        assert collector.stderr is not None
        assert collector.stderr.read().count(b"No space left") == 1, "said once"
    with open_store(store) as reader:
        assert reader.sql("select count(*), count(distinct (writer, seq)) from events").row(0) == (200, 200)


@pytest.mark.limit(90)
def test_a_collector_that_cannot_be_started_is_told_once_and_comes_when_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    store.root.touch()  # where the folder should be
    kept = KeptCollector(store)
    monkeypatch.setattr(process, "LOOK_S", 0.0)
    for _ in range(3):
        kept.keep()
    assert capsys.readouterr().err.count("the collector cannot be started: ") == 1
    monkeypatch.setattr(process, "LOOK_S", 60.0)
    kept.keep()
    store.root.unlink()
    kept.keep()
    assert not store.root.exists(), "it looks now and then"
    again = KeptCollector(store)
    again.keep()
    wait_for(lambda: is_held(store.lock("collector")))


@pytest.mark.parametrize("ahead_us", [0, 5_000_000, -90])
def test_two_messages_bound_how_far_a_clock_is_ahead(ahead_us: int) -> None:
    for first_us, second_us in ((0, 0), (1, 2), (700, 40), (40, 90_000)):  # how long they were on their way
        clock = _compared("node-0", ahead_us - first_us, ahead_us + second_us)
        assert isinstance(clock, HostClock)
        assert abs(clock.offset_us - ahead_us) <= clock.within_us <= (first_us + second_us + 1) // 2
