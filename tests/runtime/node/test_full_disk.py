"""The disk fills while real processes train: what the log then lacks is reported, and a run is done only if its log shows it.

A rank's files are refused by a limit on their size, which needs no rights and can be lifted again; the controller's by a write
that fails as on a full disk.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import parent
from support.training.runtime_runs import SMALL, Run, light, train

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.collector.events import CheckpointSaved, DeviceJoined, DeviceLost, IterationCommitted, PlanIssued, RunFinished
from unskew.collector.files.checkpoints import checkpoints
from unskew.collector.files.segment import SpoolSegment
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.collector.service.check import NO_END, check
from unskew.collector.service.maintenance import maintaining
from unskew.edge.load_run import load_run
from unskew.runtime.control.ending import ending
from unskew.runtime.protocol import NodeFinished, RankFinished

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]
QUIET = NodeFinished(unwritten=0)
LIGHT = light(SMALL)
_HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


class Disk:
    """What the ranks write to: full from iteration `full_at` on, and free again `for_s` seconds later."""

    def __init__(self, full_at: int, for_s: float | None = None) -> None:
        self.full_at, self.for_s = full_at, for_s
        self.pids: list[int] = []
        self._filled = False

    def watch(self, _run: Run, entry: Entry) -> None:
        if isinstance(entry.event, DeviceJoined):
            self.pids.append(entry.event.pid)
        elif isinstance(entry.event, IterationCommitted) and entry.event.iteration >= self.full_at and not self._filled:
            self._filled = True
            self._take(0)
            if self.for_s is not None:
                threading.Timer(self.for_s, self._take, [_HARD]).start()

    def _take(self, most_bytes: int) -> None:
        for pid in self.pids:
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, _HARD))
            except ProcessLookupError:  # it was killed
                continue


def findings(run: Run) -> list[str]:
    with maintaining(run.store):
        return [finding.sentence for finding in check(run.store, mend=False).findings]


def test_a_run_whose_last_commits_are_not_in_the_log_is_not_done(tmp_path: Path) -> None:
    run = train(tmp_path, base=LIGHT, on_event=Disk(full_at=5).watch, iterations=30)
    (finished,) = run.of(RunFinished)
    logged = len(run.losses)
    assert (finished.status, finished.committed, finished.iterations) == ("incomplete", 30, logged)
    assert 5 < logged < 30
    # Each rank has eight chunks and its commit in every iteration, besides messages.
    assert finished.unwritten > 4 * 9 * (30 - logged - 1)
    assert finished.reason.startswith(f"the log holds {logged} of the 30 iterations that were committed, ")
    assert finished.reason.endswith("events could not be written (File too large)")
    summary = run.summary
    assert (summary.status, summary.committed, summary.iterations) == ("incomplete", 30, logged)
    assert (summary.events.unwritten, summary.events.log_complete) == (finished.unwritten, False)
    (found,) = findings(run)
    assert found.startswith(f"run {run.id}: the log holds {logged} of the 30 iterations")
    with open_store(run.store) as reader:
        diagnosed = diagnose(load_run(reader, run.id))
    assert diagnosed.outcome == "cannot_be_judged"
    assert diagnosed.why.startswith(f"the log holds {logged} of the 30 iterations")


def test_a_disk_that_is_free_again_gets_every_line(tmp_path: Path) -> None:
    run = train(tmp_path, base=LIGHT, on_event=Disk(full_at=5, for_s=0.7).watch, iterations=30)
    (finished,) = run.of(RunFinished)
    assert (finished.status, finished.iterations, finished.committed, finished.unwritten) == ("done", 30, 30, 0)
    assert len(run.losses) == 30
    assert (run.summary.events.written, run.summary.events.dropped) == (run.summary.events.stored, 0)
    assert run.sql("select * from executed($run) where times != 1") == []
    assert findings(run) == []


def test_heartbeats_that_the_disk_refused_are_counted(tmp_path: Path) -> None:
    """They are the agent's own events: the ranks' logs are whole."""
    disk = Disk(full_at=2)

    def of_agent(run: Run, entry: Entry) -> None:
        if isinstance(entry.event, DeviceJoined) and entry.event.rank == 0:
            zygote = parent(entry.event.pid)
            disk.pids = [parent(zygote)]
        elif not isinstance(entry.event, DeviceJoined):
            disk.watch(run, entry)

    run = train(tmp_path, base=LIGHT, on_event=of_agent, iterations=60)
    (finished,) = run.of(RunFinished)
    assert (finished.status, finished.iterations, finished.committed) == ("incomplete", 60, 60)
    assert finished.unwritten >= 4
    assert finished.reason == f"{finished.unwritten} events could not be written (File too large)"


@pytest.mark.parametrize("freed", [True, False])
def test_a_recovery_goes_on_while_the_disk_is_full(freed: bool, tmp_path: Path) -> None:
    disk = Disk(full_at=4, for_s=2.0 if freed else None)
    run = train(tmp_path, "kill:rank=3,at=9", base=LIGHT, on_event=disk.watch, iterations=20)
    (finished,) = run.of(RunFinished)
    assert [(lost.rank, lost.how, lost.detail) for lost in run.of(DeviceLost)] == [(3, "exit", "signal SIGKILL")]
    assert (finished.status, finished.committed) == ("done" if freed else "incomplete", 20)
    assert (len(run.losses) == 20) is freed


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, when: Callable[[bytes], bool]) -> None:
    """Let the controller's disk be full from the first control line on for which `when` holds."""
    write: Any = SpoolSegment.write
    seen: list[bytes] = []

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def writing(segment: SpoolSegment, data: bytes) -> int:
        if b'"stream":' in data:
            seen.append(data)
            if method == "write" and any(map(when, seen)):
                fail()
        return int(write(segment, data))

    def syncing(_segment: SpoolSegment) -> None:
        if any(map(when, seen)):
            fail()

    monkeypatch.setattr(SpoolSegment, "write", writing)
    if method == "sync":
        monkeypatch.setattr(SpoolSegment, "sync", syncing)


def test_where_the_end_cannot_be_logged_the_summary_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "write", lambda line: b"run_finished@1" in line)
    run = train(tmp_path, base=LIGHT)
    assert run.of(RunFinished) == []
    summary = run.summary
    assert (summary.status, summary.iterations, summary.committed) == ("incomplete", 12, 12)
    assert summary.reason.startswith(f"the end of the run is not in the log: cannot write stream run/{run.id} in ")
    assert summary.reason.endswith("No space left on device")
    assert summary.outcome.outcome == "cannot_be_judged"
    assert summary.outcome.why.startswith("the end of the run is not in the log: ")
    (row,) = run.sql("select status, iterations from runs where run = $run")
    # Until a collector that finds its controller gone ends it by name.
    assert row in ({"status": "unfinished", "iterations": 12}, {"status": "failed", "iterations": 12})
    assert findings(run) == [f"run {run.id}: {NO_END}"]


@pytest.mark.parametrize("method", ["write", "sync"])
def test_a_decision_that_cannot_be_logged_is_not_carried_out(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, method, lambda line: b'"device_lost@1"' in line)
    run = train(tmp_path, "kill:rank=3,at=5", base=LIGHT)
    summary = run.summary
    assert summary.status == "failed"
    assert summary.reason.count("cannot write stream") == 1
    assert summary.outcome.outcome == "wrong"
    assert f"the run failed: {summary.reason}" in summary.outcome.why
    assert "No space left on device" in summary.reason
    assert summary.committed == summary.iterations == 5
    # A line that the kernel took before the disk refused it can be read; the recovery was not begun by it.
    assert len(run.of(PlanIssued)) == 1
    assert len(run.of(DeviceLost)) == (1 if method == "sync" else 0)
    assert run.of(RunFinished) == []


def refuse_lines(monkeypatch: pytest.MonkeyPatch, holding: bytes) -> None:
    """Let the disk have no room for lines that hold this, and for all others."""
    write: Any = SpoolSegment.write

    def writing(segment: SpoolSegment, data: bytes) -> int:
        if holding in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(write(segment, data))

    monkeypatch.setattr(SpoolSegment, "write", writing)


def test_a_run_that_a_full_disk_ended_lacks_that_decision_though_its_end_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that end, and a collector that packs their lines, make room for the last words: the log is not whole still."""
    refuse_lines(monkeypatch, b'"device_lost@1"')
    run = train(tmp_path, "kill:rank=3,at=5", base=LIGHT)
    (finished,) = run.of(RunFinished)
    assert (finished.status, finished.iterations, finished.committed) == ("failed", 5, 5)
    assert finished.unwritten > 0
    assert run.summary.events.log_complete is False
    assert findings(run) == [f"run {run.id}: {finished.unwritten} events could not be written"]
    with open_store(run.store) as reader:
        diagnosed = diagnose(load_run(reader, run.id))
    (row,) = run.sql("select outcome, why from outcomes where run = $run")
    stated = {(one.outcome, one.why) for one in (diagnosed, run.summary.outcome)} | {(row["outcome"], row["why"])}
    ((word, why),) = stated
    assert (word, why.startswith("the run failed: cannot write ")) == ("wrong", True)
    assert why.endswith(f"; {finished.unwritten} events could not be written")


def test_training_goes_on_where_a_checkpoint_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_lines(monkeypatch, b'"checkpoint_saved@1"')
    run = train(tmp_path, base=LIGHT, checkpoint_every=4)
    assert (run.summary.status, run.summary.reason, run.of(CheckpointSaved)) == ("done", "", [])
    assert len(checkpoints(run.store, run.id)) > 0


def report(rank: int, committed: int, unwritten: int = 0) -> RankFinished:
    return RankFinished(rank=rank, committed=committed, unwritten=unwritten, problem="full" if unwritten else "")


@pytest.mark.parametrize(
    ("reports", "last_logged", "end"),
    [
        # What a rank reported as unwritten, and wrote in time after all, is not missing.
        ([report(0, 10, 7), report(1, 10)], {0: 9, 1: 9}, ("done", 0, "")),
        # All iterations are there by another rank's word, but not all that happened in them.
        ([report(0, 10, 7), report(1, 10)], {0: 8, 1: 9}, ("incomplete", 7, "7 events could not be written (full)")),
        # A rank that was lost meanwhile reports nothing, and its log ends with it.
        ([report(1, 10)], {0: 4, 1: 9}, ("done", 0, "")),
    ],
)
def test_done_is_what_the_log_of_every_living_rank_shows(
    reports: list[RankFinished], last_logged: dict[int, int], end: tuple[str, int, str]
) -> None:
    end_of_run = ending(
        "done", "", committed=10, reports=reports, logged=range(10), last_logged=last_logged, node=QUIET, unwritten=0
    )
    assert (end_of_run.status, end_of_run.unwritten, end_of_run.reason) == end


def test_a_run_that_failed_says_how_far_it_was_trained() -> None:
    end_of_run = ending("failed", "why", committed=8, reports=[], logged=range(5), last_logged={0: 4}, node=QUIET, unwritten=0)
    assert (end_of_run.status, end_of_run.reason, end_of_run.iterations, end_of_run.committed) == ("failed", "why", 5, 8)
