"""How long a vote waits for the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unskew.runtime.rank.recorder import PATIENCE_S, SHORT_PATIENCE_S, Recorder


class Disk:
    """Takes the log in time or not, and remembers how long it was waited for."""

    def __init__(self) -> None:
        self.in_time = True
        self.waited_s: list[float] = []

    def hand_over(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self.in_time


def recorder_on(disk: Disk) -> Recorder:
    spec: Any = SimpleNamespace(options=SimpleNamespace(instrument_turns=0))
    spool: Any = disk
    return Recorder(spool, SimpleNamespace(), spec)  # type: ignore[arg-type]


def begin(recorder: Recorder, iteration: int) -> None:
    plan: Any = SimpleNamespace(plan_version=0)
    recorder.begin(plan, iteration, 0)


def test_a_stalled_disk_costs_the_long_wait_once() -> None:
    disk = Disk()
    recorder = recorder_on(disk)
    for iteration, disk.in_time in enumerate((True, False, False, True, True)):
        begin(recorder, iteration)
        assert recorder.hand_over() is disk.in_time
    assert disk.waited_s == [PATIENCE_S, PATIENCE_S, SHORT_PATIENCE_S, SHORT_PATIENCE_S, PATIENCE_S]


def test_what_was_missing_before_a_sum_is_missing_in_the_vote() -> None:
    """The spool counts what it dropped until it is asked, and an attempt asks before each sum that begins early."""
    disk = Disk()
    recorder = recorder_on(disk)
    begin(recorder, 0)
    for disk.in_time, complete in ((True, True), (False, False), (True, False)):
        assert recorder.hand_over() is complete
    begin(recorder, 1)
    assert recorder.hand_over()
