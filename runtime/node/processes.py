"""Small facts about processes, from Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from unskew.analytics.health.liveness import ENDING

_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KINDS_LIVED = 7  # user, nice, system, idle, iowait, irq, softirq; then comes steal
_FLAGS, _IS_ENDING = 6, 0x4
_BEGAN, _LAST_CORE, _EXIT = 19, 36, 49


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_detail(ended: os.waitid_result) -> str:
    """How a child ended, in words: "signal SIGKILL" or "exit code 3"."""
    if ended.si_code == os.CLD_EXITED:
        return f"exit code {ended.si_status}"
    return f"signal {signal.Signals(ended.si_status).name}"


def how_it_ended(process: subprocess.Popen[bytes], wait_s: float) -> str:
    """The same of a child that has closed its connection and ends within `wait_s`, or has not ended by then."""
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return "its process goes on"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class CoreTime(NamedTuple):
    """What the kernel has counted of a thread since it began: seconds on a core, and seconds ready without one.

    A wait is added when it ends: of one that goes on nothing is counted yet, however long it is.
    """

    ran_s: float
    waited_s: float


def core_time(pid: int, thread: int) -> CoreTime | None:
    """None where the kernel does not report it."""
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return CoreTime(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


def lived_by_core() -> dict[int, float]:
    """Seconds that each core has lived, running or idle: all but those in which a hypervisor let it stand still.

    Cores of which the kernel counts nothing (in some sandboxes) are left out.
    """
    found = {}
    for line in Path("/proc/stat").read_text().splitlines()[1:]:
        name, *ticks = line.split()
        if not name.startswith("cpu"):
            break
        if lived := sum(map(int, ticks[:_KINDS_LIVED])):
            found[int(name[3:])] = lived / _TICKS_PER_S
    return found


def last_core(pid: int, thread: int) -> int:
    """The core on which a thread ran last; -1 when it is gone."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    return int(fields[_LAST_CORE]) if fields else -1


def threads_of(pid: int) -> tuple[int, ...]:
    """The threads of a process; none when it is gone."""
    try:
        return tuple(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - many times a second
    except OSError:
        return ()


def thread_state(pid: int, thread: int) -> str | None:
    """The state letter of a thread (R running or ready, S sleeping, T stopped, Z ended, ...), None when there is none."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    return fields[0] if fields else None


def process_state(pid: int) -> str | None:
    """The same of a process; X also while it ends, which takes as long as its memory is large."""
    fields = _stat(f"/proc/{pid}/stat")
    if fields and int(fields[_FLAGS]) & _IS_ENDING:
        return ENDING
    return fields[0] if fields else None


def began_at(pid: int) -> int | None:
    """When a process began (ticks): with its number, which is used again, it says which one it is. None when there is none."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[_BEGAN]) if fields else None


def exit_status(pid: int) -> int | None:
    """The wait status of a process that has ended and was not reaped yet, None when there is none."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[_EXIT]) if fields else None


def _stat(path: str) -> list[str]:
    """The fields behind the name, the state first; none when the process is gone."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []
