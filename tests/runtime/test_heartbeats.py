"""What the agent makes of heartbeats and of the kernel's counts: a stand-in for the kernel, so that each case is exact."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from unskew.runtime.node import heartbeats
from unskew.runtime.node.processes import CoreTime, core_time
from unskew.runtime.protocol import HeartbeatDatagram, RankStatus, decode_beat, encode_beat

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
    return waited


def beat(table: heartbeats.HeartbeatTable, count: int, at_s: float) -> None:
    table.beat(HeartbeatDatagram(0, BEATING, count, 3, "compute"), now_s=at_s)


def look(table: heartbeats.HeartbeatTable, *at_s: float) -> RankStatus:
    for now in at_s:
        table.look(now)
    return table.statuses(at_s[-1])[0]


def test_time_without_a_core_counts_from_the_last_progress(lacks: dict[int, float | None]) -> None:
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, 0.0)
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
    table.born(0, PID, 0.0)
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
    table.born(0, PID, 0.0)
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
    table.born(0, PID, 0.0)
    beat(table, 1, 0.0)
    found = look(table, 0.0, 1.2)
    assert found.stalled_s == pytest.approx(1.2)
    assert found.starved_s == pytest.approx(1.0)
    assert found.beat_starved_s == pytest.approx(1.0)


def test_where_the_kernel_does_not_tell_it_is_not_measured(lacks: dict[int, float | None]) -> None:
    lacks.update(dict.fromkeys(lacks))
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, 0.0)
    beat(table, 1, 0.0)
    assert look(table, 0.0, 0.1).starved_s is None


def test_the_longest_recent_work_is_forgotten_slowly(lacks: dict[int, float | None]) -> None:
    assert lacks
    table = heartbeats.HeartbeatTable()
    table.born(0, PID, 0.0)
    beat(table, 1, 0.0)
    beat(table, 1, 2.0)
    beat(table, 2, 2.1)
    assert look(table, 2.1).longest_work_s == pytest.approx(2.0)
    for count in range(3, 203):
        beat(table, count, 2.1 + count / 100)
    assert look(table, 5.0).longest_work_s < 0.5


def test_a_heartbeat_comes_through_its_datagram() -> None:
    sent = HeartbeatDatagram(7, 4242, 99, 12, "recv", 3, 60.0)
    assert decode_beat(encode_beat(sent)) == sent
    assert decode_beat(encode_beat(msgspec.structs.replace(sent, waits_for=None))).waits_for is None
