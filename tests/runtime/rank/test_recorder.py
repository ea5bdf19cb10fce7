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


def test_a_stalled_disk_costs_the_long_wait_once() -> None:
    disk: Any = Disk()
    recorder = Recorder(disk, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for disk.in_time in (True, False, False, True, True):
        assert recorder.hand_over() is disk.in_time
    assert disk.waited_s == [PATIENCE_S, PATIENCE_S, SHORT_PATIENCE_S, SHORT_PATIENCE_S, PATIENCE_S]
