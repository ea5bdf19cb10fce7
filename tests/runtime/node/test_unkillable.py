"""A process that waits in the kernel, where SIGKILL does not end it: training goes on without it, and with it when it goes on.

The first version of the cgroup freezer holds a process so, as a driver that hangs does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import Run, train, wait_until

from unskew.collector.events import DeviceJoined, DeviceLost, IterationCommitted, PlanApplied, RankAdded, RunFinished
from unskew.collector.files.tail import Entry
from unskew.runtime.node.processes import process_state

FREEZER = Path("/sys/fs/cgroup/freezer")

pytestmark = [
    pytest.mark.limit(90),
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access(FREEZER / "cgroup.procs", os.W_OK), reason="needs the cgroup freezer, version 1, and root"
    ),
]


class Freezer:
    """Freezes a rank when iteration 5 is committed, and thaws it when the run has lost it or is over."""

    def __init__(self, group: Path, rank: int, *, thaw_when_lost: bool) -> None:
        self.group, self.rank, self.thaw_when_lost = group, rank, thaw_when_lost
        self.pid, self.frozen_s, self.excised_s, self.state = 0, 0.0, 0.0, ""

    def __call__(self, run: Run, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, DeviceJoined) and event.rank == self.rank and not self.pid:
            self.pid = event.pid
            (self.group / "cgroup.procs").write_text(str(self.pid))
        elif isinstance(event, IterationCommitted) and event.iteration == 5 and not self.frozen_s:
            (self.group / "freezer.state").write_text("FROZEN")
            self.frozen_s = time.monotonic()
        elif isinstance(event, DeviceLost):
            self.state = process_state(self.pid) or "gone"
            if self.thaw_when_lost:
                self.thaw()
        elif isinstance(event, PlanApplied) and run.of(DeviceLost):
            self.excised_s = self.excised_s or time.monotonic()

    def thaw(self) -> None:
        (self.group / "freezer.state").write_text("THAWED")


@pytest.fixture
def group() -> Iterator[Path]:
    group = FREEZER / f"unskew-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    assert wait_until(lambda: not (group / "cgroup.procs").read_text(), 10)
    group.rmdir()


@pytest.mark.parametrize("thaw_when_lost", [False, True])
def test_training_goes_on_without_a_rank_that_no_signal_ends(thaw_when_lost: bool, group: Path, tmp_path: Path) -> None:
    freezer = Freezer(group, 2, thaw_when_lost=thaw_when_lost)
    run = train(tmp_path, on_event=freezer, iterations=60)
    assert run.of(RunFinished)[-1].status == "done"
    assert run.losses == pytest.approx(undisturbed_losses(run.options), rel=0, abs=1e-8)
    (lost,) = run.of(DeviceLost)
    assert (lost.rank, lost.how, lost.cut_off, freezer.state) == (2, "frozen", True, "D")
    assert "while its process exists" in lost.detail
    assert run.same_process - {2} == {0, 1, 3}
    assert run.of(RankAdded) == []
    assert [joined.pid == freezer.pid for joined in run.of(DeviceJoined) if joined.rank == 2] == [True] * (1 + thaw_when_lost)
    seconds = freezer.excised_s - freezer.frozen_s
    print(f"frozen to regrouped without it: {seconds:.2f} s")
    assert seconds < 5
