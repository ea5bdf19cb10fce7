"""What the agent makes of heartbeats and of the kernel's counts: a stand-in for the kernel, so that each case is exact."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest

from unskew.runtime.heartbeat_page import Beat, HeartbeatPage, shared_memory
from unskew.runtime.node import heartbeats
from unskew.runtime.node.processes import CoreTime, core_time, last_core, lived_by_core
from unskew.runtime.protocol import RankStatus

PID, BEATING, OTHER = 100, 101, 102


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> dict[int, float | None]:
    """thread -> seconds without a core, as the kernel would tell."""
    waited: dict[int, float | None] = {PID: 0.0, BEATING: 0.0, OTHER: 0.0}

    def core_time(_pid: int, thread: int) -> CoreTime | None:
        waited_s = waited[thread]
        return None if waited_s is None else CoreTime(1.0, waited_s)

    monkeypatch.setattr(heartbeats, "core_time", core_time)
    monkeypatch.setattr(heartbeats, "thread_state", lambda _pid, _thread: "S")
    monkeypatch.setattr(heartbeats, "threads_of", lambda _pid: tuple(waited))
    monkeypatch.setattr(heartbeats, "lived_by_core", dict)
    return waited


def heartbeat(count: int, at_s: float, pid: int = PID) -> Beat:
    return Beat(pid=pid, thread=BEATING, count=count, iteration=3, activity="compute", at_s=at_s, moved_s=at_s)


def beat(table: heartbeats.HeartbeatTable, count: int, at_s: float) -> None:
    beat = heartbeat(count, at_s)
    table.beat(0, beat)


def look(table: heartbeats.HeartbeatTable, *at_s: float) -> RankStatus:
    for now in at_s:
        table.look(now)
    return table.statuses(at_s[-1])[0]


def test_time_without_a_core_counts_from_the_last_progress(lacks: dict[int, float | None]) -> None:
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    look(table, 0.0)
    lacks[PID] = 0.08
    assert look(table, 0.1).starved_s == pytest.approx(0.08)
    beat(table, 2, 0.15)
    assert look(table, 0.2).starved_s == 0.0


def test_a_sibling_counts_once_the_rank_stands_still_and_the_beating_thread_only_for_silence(
    lacks: dict[int, float | None],
) -> None:
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    lacks[OTHER] = 0.05
    assert look(table, 0.0, 0.1, 0.2, 0.3, 0.4).starved_s == 0.0
    lacks[OTHER], lacks[BEATING] = 0.11, 0.09
    found = look(table, 0.5)
    assert found.starved_s == pytest.approx(0.06)
    assert found.beat_starved_s == pytest.approx(0.09)


def test_a_wait_that_goes_on_counts_before_the_kernel_adds_it(
    lacks: dict[int, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "thread_state", lambda _pid, thread: "R" if thread == PID else "S")
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    assert look(table, *(tenth / 10 for tenth in range(11))).starved_s == pytest.approx(0.9)
    lacks[PID] = 1.05
    assert look(table, 1.1).starved_s == pytest.approx(1.0)
    assert look(table, 1.2).starved_s == pytest.approx(1.0)


@pytest.mark.alone
def test_the_kernel_adds_a_wait_when_it_ends() -> None:
    """A process that three others keep off its core: its counts stand still, its state says why."""
    burning = "import os, sys\nos.sched_setaffinity(0, [0])\n{policy}\nprint(flush=True)\nwhile True: pass"
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    burners: list[subprocess.Popen[bytes]] = []
    try:
        for policy in (idle, "", "", ""):
            burner = subprocess.Popen([sys.executable, "-c", burning.format(policy=policy)], stdout=subprocess.PIPE)
            burners.append(burner)
            assert burner.stdout is not None
            burner.stdout.readline()
        pid, table = burners[0].pid, heartbeats.HeartbeatTable()
        began_s = time.monotonic()
        table.born(0, pid, began_s)
        stood_still = 0
        while (now_s := time.monotonic()) < began_s + 3.0:
            before = core_time(pid, pid)
            table.look(now_s)
            time.sleep(0.1)
            stood_still += core_time(pid, pid) == before
        (found,) = table.statuses(now_s)
        assert stood_still >= 5
        assert found.starved_s is not None
        assert found.starved_s > 0.8 * found.stalled_s
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()


def test_nobody_is_blamed_for_the_time_the_agent_had_no_core(lacks: dict[int, float | None]) -> None:
    assert lacks
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    found = look(table, 0.0, 1.2)
    assert found.stalled_s == pytest.approx(1.2)
    assert found.starved_s == pytest.approx(1.0)
    assert found.beat_starved_s == pytest.approx(1.0)


def test_where_the_kernel_does_not_tell_it_is_not_measured(lacks: dict[int, float | None]) -> None:
    lacks.update(dict.fromkeys(lacks))
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    assert look(table, 0.0, 0.1).starved_s is None


def test_the_longest_recent_work_is_forgotten_slowly(lacks: dict[int, float | None]) -> None:
    assert lacks
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    beat(table, 1, 2.0)
    beat(table, 2, 2.1)
    assert look(table, 2.1).longest_work_s == pytest.approx(2.0)
    for count in range(3, 203):
        beat(table, count, 2.1 + count / 100)
    assert look(table, 5.0).longest_work_s < 0.5


def test_a_heartbeat_of_the_process_that_was_the_rank_before_does_not_count(lacks: dict[int, float | None]) -> None:
    assert lacks
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, 1.0)
    table.beat(0, heartbeat(7, 1.5, pid=PID - 1))
    table.beat(0, heartbeat(3, 1.2))
    assert table.count(0) == 3
    assert look(table, 2.0).heartbeat_age_s == pytest.approx(0.8)


def test_a_heartbeat_comes_through_the_memory_and_half_a_one_does_not() -> None:
    memory = shared_memory()
    ours, theirs = HeartbeatPage(os.dup(memory)), HeartbeatPage(memory)
    sent = msgspec.structs.replace(heartbeat(99, 12.5), activity="recv", waits_for=3, promised_s=60.0)
    assert ours.read(7) is None
    for written in (sent, msgspec.structs.replace(sent, waits_for=None)):
        theirs.write(7, written)
        assert ours.read(7) == written
    theirs._memory[7 * 64] ^= 1
    assert ours.read(7) is None
    assert ours.read(8) is None


def test_a_core_that_stood_still_is_no_core(lacks: dict[int, float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hypervisor that gives the machine's core to another: no thread is ready, and yet none can run."""
    lived = {0: 5.0, 1: 5.0}
    monkeypatch.setattr(heartbeats, "lived_by_core", lambda: dict(lived))
    monkeypatch.setattr(heartbeats, "last_core", lambda _pid, thread: 1 if thread == BEATING else 0)
    assert lacks
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, -0.1)
    beat(table, 1, 0.0)
    look(table, 0.0)
    for tenth in range(1, 10):
        lived[0] += 0.09  # the grain of the count is no theft
        found = look(table, tenth / 10)
    assert found.beat_starved_s == pytest.approx(0.9)
    assert found.starved_s == 0.0


def test_every_core_of_this_machine_lives() -> None:
    before, began_s = lived_by_core(), time.monotonic()
    time.sleep(0.3)
    after, passed_s = lived_by_core(), time.monotonic() - began_s
    assert last_core(os.getpid(), os.getpid()) in after
    assert all(0.0 <= after[core] - before[core] <= passed_s + 0.1 for core in after)
