"""What the last words of a run say that its log lacks."""

from __future__ import annotations

from typing import Any

import pytest

from unskew.collector.events import RunFinished, RunStarted
from unskew.collector.log_gap import log_gap

STARTED: dict[str, Any] = {
    "run": "r", "device": "sleep", "clock": "monotonic", "mode": "auto", "ranks": 4, "options": {"iterations": 200}, "code": "",
    "version": "0", "device_kind": "sleep",
}  # fmt: skip


@pytest.mark.parametrize(
    ("started", "finished", "gap"),
    [
        ({}, {"committed": 200, "iterations": 200}, ""),
        ({}, {"committed": 200, "iterations": 141}, "the log holds 141 of the 200 iterations that were committed"),
        ({}, {"committed": 200, "iterations": 200, "unwritten": 1234}, "1,234 events could not be written"),
        # Stopped early, and whole.
        ({}, {"status": "stopped", "committed": 50, "iterations": 50}, ""),
        # By versions whose ranks did not report.
        ({}, {"iterations": 141}, "the log holds 141 of the 200 iterations that were committed"),
        ({}, {"status": "failed", "iterations": 141}, ""),
        # The simulator plays hours, not a number of iterations; another tool's log asks for nothing.
        ({"device_kind": None}, {"iterations": 141}, ""),
        ({"options": {}}, {"iterations": 141}, ""),
    ],
)
def test_done_is_held_against_what_was_committed(started: dict[str, Any], finished: dict[str, Any], gap: str) -> None:
    assert log_gap(RunStarted(**{**STARTED, **started}), RunFinished(**{"status": "done", **finished})) == gap
