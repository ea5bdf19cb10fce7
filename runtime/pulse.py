"""What an agent knows of its ranks from their heartbeats."""

from __future__ import annotations

import msgspec

from unskew.analytics.liveness import Activity
from unskew.runtime.processes import process_state
from unskew.runtime.protocol import RankPulse


class _Known(msgspec.Struct):
    pid: int
    beat_s: float
    moved_s: float
    count: int = 0
    iteration: int = 0
    activity: Activity = "idle"
    waits_for: int | None = None
    longest_work_s: float = 0.0


class PulseTable:
    """Last heartbeat and last progress of each living rank; times are the agent's monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def born(self, rank: int, pid: int, now_s: float) -> None:
        self._known[rank] = _Known(pid, now_s, now_s)

    def gone(self, rank: int) -> None:
        self._known.pop(rank, None)

    def beat(self, rank: int, count: int, iteration: int, activity: Activity, waits_for: int | None, *, now_s: float) -> None:
        """Take a heartbeat; a late one of a rank that is gone is ignored."""
        known = self._known.get(rank)
        if known is None:
            return
        if count != known.count:
            if known.activity == "compute":
                known.longest_work_s = max(known.longest_work_s, known.beat_s - known.moved_s)
            known.moved_s = now_s
        known.beat_s, known.count, known.iteration = now_s, count, iteration
        known.activity, known.waits_for = activity, waits_for

    def pulses(self, now_s: float) -> tuple[RankPulse, ...]:
        return tuple(
            RankPulse(
                rank=rank,
                longest_work_s=known.longest_work_s,
                heartbeat_age_s=now_s - known.beat_s,
                stalled_s=now_s - known.moved_s,
                activity=known.activity,
                waits_for=known.waits_for,
                iteration=known.iteration,
                state=process_state(known.pid),
            )
            for rank, known in sorted(self._known.items())
        )

    def pid(self, rank: int) -> int:
        return self._known[rank].pid

    def count(self, rank: int) -> int:
        return self._known[rank].count
