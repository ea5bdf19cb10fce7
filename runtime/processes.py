"""Small facts about processes, from Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_detail(status: int) -> str:
    """A wait status in words: "signal SIGKILL" or "exit code 3"."""
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def starved_s(pid: int, thread: int) -> float | None:
    """Seconds for which a thread was ready to run but had no core, since it began; None where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def threads_of(pid: int) -> tuple[int, ...]:
    """The threads of a process; none when it is gone."""
    try:
        return tuple(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - many times a second
    except OSError:
        return ()


def process_state(pid: int) -> str | None:
    """The state letter of a process (R running, S sleeping, T stopped, Z ended, ...), None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]
