"""The next collector ends a run whose controller is gone, by name; a log that was removed is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.store.store_contract import note

from unskew.collector.events import IterationCommitted, RunFinished, RunStarted
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.service.check import NO_END, check
from unskew.collector.service.collecting import Collector
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter


def begun(store: Store, run: str, writer: str = "controller", *last: RunFinished) -> None:
    """A run of three iterations, with these last words."""
    stream, rank = ControlStream(store, run, f"run/{run}", writer), SpoolWriter(store, run, "rank-0000.1")
    started = RunStarted(run=run, device="d", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
    stream.add(started, *last)
    for number in range(3):
        rank.append(
            IterationCommitted(iteration=number, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=1, start_us=number,
                               wall_us=1, log_complete=True)
        )  # fmt: skip
    assert rank.close()
    stream.close()


@pytest.mark.slow
def test_the_next_collector_ends_a_run_whose_controller_was_killed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    begun(store, "killed")
    begun(store, "whole", "controller", RunFinished(status="done", iterations=3))
    begun(store, "foreign", "import")
    begun(store, "going-on")
    with hold_controller_lock(store, "going-on"):
        collector = Collector(store)
        while collector.step() and store.spooled_runs() != ["going-on"]:
            pass
        with open_store(store) as reader:
            found = {run: tuple(rest) for run, *rest in reader.sql("select run, status, iterations, reason from runs").rows()}
        collector.close()
        named = [finding.sentence for finding in check(store, mend=False).findings]
    assert found["whole"][0] == "done"
    assert found["foreign"][0] == found["going-on"][0] == "unfinished"
    assert found["killed"][:2] == ("failed", 3)
    assert "its controller was gone without a word" in found["killed"][2]
    assert "or its disk was full; what the log lacks of its end is not known" in found["killed"][2]
    # A controller that was killed, or whose disk was full, may have cost the log its end, whoever ends the run later.
    assert named == [f"run {run}: {NO_END}" for run in ("foreign", "killed")]
    assert f"run going-on: {NO_END}" in [finding.sentence for finding in check(store, mend=False).findings]


def test_a_stream_whose_file_was_removed_takes_nothing_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    stream = ControlStream(store, "r", "run/r", "controller")
    assert not stream.removed
    stream.add(note("here"))
    assert not stream.removed
    shutil.rmtree(store.root / "spool")
    assert stream.removed
    with pytest.raises(StoreError, match="was removed: the log of the run is lost"):
        stream.add(note("nowhere"))
    stream.close()
