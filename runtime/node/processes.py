"""Small facts about processes, from Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_detail(status: int) -> str:
    """A wait status in words: "signal SIGKILL" or "exit code 3"."""
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


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


def threads_of(pid: int) -> tuple[int, ...]:
    """The threads of a process; none when it is gone."""
    try:
        return tuple(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - many times a second
    except OSError:
        return ()


def thread_state(pid: int, thread: int) -> str | None:
    """The state letter of a thread (R running or ready, S sleeping, T stopped, Z ended, ...), None when there is none."""
    return _state(f"/proc/{pid}/task/{thread}/stat")


def process_state(pid: int) -> str | None:
    """The same of a process."""
    return _state(f"/proc/{pid}/stat")


def _state(path: str) -> str | None:
    try:
        return Path(path).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
