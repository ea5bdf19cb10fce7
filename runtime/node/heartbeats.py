"""What an agent knows of its ranks from their heartbeats, and from the kernel about their threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unskew.analytics.health.liveness import Activity
from unskew.runtime.heartbeat_page import Beat, HeartbeatPage
from unskew.runtime.node.processes import (
    CoreTime,
    core_time,
    last_core,
    lived_by_core,
    process_state,
    thread_state,
    threads_of,
)
from unskew.runtime.protocol import RankStatus

STATUS_S = 0.1
_FORGET = 0.99
_STILL_S = 0.25
_STOLEN_S = 0.05
"""Less is the grain of the kernel's count."""


class _Waits(msgspec.Struct, frozen=True):
    """A thread's counts at one look, and since when it has been ready without running (None: it is not)."""

    counted: CoreTime
    since_s: float | None

    def total_s(self, now_s: float) -> float:
        return self.counted.waited_s + (now_s - self.since_s if self.since_s is not None else 0.0)


class _Look(msgspec.Struct, frozen=True):
    """When the agent looks, and how long ago it last did.

    For `late_s` of that it had no core itself, so nobody is blamed for it. `stolen`: seconds of it that a core did not live,
    as its machine was given to another.
    """

    now_s: float
    passed_s: float
    late_s: float
    stolen: Mapping[int, float]


class _Lack(msgspec.Struct):
    """How long a thread could not go on since its last sign, because it, or a thread it may wait for, had no core.

    Its siblings count too: one that was preempted may hold the interpreter's lock, or one of the communication library.
    """

    waits: dict[int, _Waits] = {}
    looked_s: float = 0.0
    since_sign_s: float | None = 0.0

    def look(self, pid: int, threads: Sequence[int], at: _Look) -> None:
        """Add what these threads lacked since the last look."""
        before, then_s, now_s = self.waits, self.looked_s, at.now_s
        found = {thread: self._waits(pid, thread, now_s) for thread in threads}
        self.waits = {thread: waits for thread, waits in found.items() if waits is not None}
        self.looked_s = now_s
        if not self.waits:
            self.since_sign_s = None
        elif self.since_sign_s is not None:
            grown = [waits.total_s(now_s) - before[one].total_s(then_s) for one, waits in self.waits.items() if one in before]
            if at.stolen:
                grown += [at.stolen.get(last_core(pid, thread), 0.0) for thread in self.waits]
            self.since_sign_s += max(at.late_s, min(max(grown, default=0.0), at.passed_s))

    def _waits(self, pid: int, thread: int, now_s: float) -> _Waits | None:
        counted = core_time(pid, thread)
        if counted is None:
            return None
        before = self.waits.get(thread)
        # It neither ran nor came to the end of a wait: asleep, or waiting for a core all the time.
        if before is None or before.counted != counted or thread_state(pid, thread) != "R":
            return _Waits(counted, None)
        return _Waits(counted, before.since_s if before.since_s is not None else now_s)

    def sign(self) -> None:
        self.since_sign_s = 0.0


class _RankRecord(msgspec.Struct):
    pid: int
    beat_s: float
    moved_s: float
    main: _Lack
    beating: _Lack
    thread: int = 0
    count: int = 0
    iteration: int = 0
    activity: Activity = "idle"
    waits_for: int | None = None
    promised_s: float = 0.0
    longest_work_s: float = 0.0
    longest_gap_s: float = 0.0
    peak_bytes: int = 0


class HeartbeatTable:
    """Last heartbeat and last progress of each living rank; times are the agent's monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[int, _RankRecord] = {}
        self._looked_s: float | None = None
        self._lived: Mapping[int, float] = {}

    def born(self, rank: int, pid: int, now_s: float) -> None:
        self._known[rank] = _RankRecord(pid, now_s, now_s, _Lack(), _Lack())

    def gone(self, rank: int) -> None:
        self._known.pop(rank, None)

    def read(self, page: HeartbeatPage) -> None:
        """Take every rank's last heartbeat."""
        for rank in self._known:
            if (beat := page.read(rank)) is not None:
                self.beat(rank, beat)

    def beat(self, rank: int, beat: Beat) -> None:
        """Take a heartbeat of a living rank; one that is known, or of a process that was the rank before, is ignored."""
        known = self._known[rank]
        if beat.pid != known.pid or beat.at_s <= known.beat_s:
            return
        if beat.count != known.count:
            if known.activity == "compute":
                took_s = known.beat_s - known.moved_s - (known.main.since_sign_s or 0.0)
                known.longest_work_s = max(_FORGET * known.longest_work_s, took_s)
            known.moved_s = beat.moved_s
            known.main.sign()
        known.beating.sign()
        known.longest_gap_s = max(known.longest_gap_s, beat.at_s - known.beat_s)
        known.beat_s, known.count, known.iteration, known.thread = beat.at_s, beat.count, beat.iteration, beat.thread
        known.activity, known.waits_for, known.promised_s = beat.activity, beat.waits_for, beat.promised_s
        known.peak_bytes = beat.peak_bytes

    def look(self, now_s: float) -> None:
        """Ask the kernel which threads had no core since the last look; due every `STATUS_S`. A core that has not lived, as its
        machine was given to another for so long (steal), is none: also who sleeps on it wakes late.

        Of a rank that stands still all threads are asked, but for its progress not the one that beats: that one wakes many
        times a second and is late a little each time, however stuck the others are.
        """
        passed_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        lived, before = lived_by_core(), self._lived
        self._lived = lived
        lacks = {core: passed_s - (lived[core] - before[core]) for core in lived.keys() & before}
        stolen = {core: lack_s for core, lack_s in lacks.items() if lack_s > _STOLEN_S}
        at = _Look(now_s, passed_s, max(passed_s - 2 * STATUS_S, 0.0), stolen)
        for known in self._known.values():
            still = now_s - min(known.moved_s, known.beat_s) > _STILL_S
            siblings = threads_of(known.pid) if still else ()
            others = (thread for thread in siblings if thread != known.thread)
            known.main.look(known.pid, (known.pid, *others), at)
            if known.thread:
                known.beating.look(known.pid, (known.thread, *siblings), at)

    def statuses(self, now_s: float) -> tuple[RankStatus, ...]:
        return tuple(
            RankStatus(
                rank=rank,
                at_s=now_s,
                alive=True,
                longest_work_s=known.longest_work_s,
                heartbeat_age_s=now_s - known.beat_s,
                stalled_s=now_s - known.moved_s,
                activity=known.activity,
                waits_for=known.waits_for,
                iteration=known.iteration,
                process_state=process_state(known.pid),
                starved_s=known.main.since_sign_s,
                beat_starved_s=known.beating.since_sign_s,
                promised_s=known.promised_s,
            )
            for rank, known in sorted(self._known.items())
        )

    def take_longest_gap_s(self, rank: int) -> float:
        """The longest pause between two heartbeats of a rank since the last call."""
        known = self._known[rank]
        gap_s, known.longest_gap_s = known.longest_gap_s, 0.0
        return gap_s

    def pid(self, rank: int) -> int:
        return self._known[rank].pid

    def peak_bytes(self, rank: int) -> int | None:
        """The most memory so far; None before the first heartbeat."""
        return self._known[rank].peak_bytes or None

    def count(self, rank: int) -> int:
        return self._known[rank].count
