"""Small facts about processes, from Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_RESET_ON_FORK = 1
_SLICE_NS = 100_000


class _SchedulingAttributes(ctypes.Structure):
    """The kernel's `struct sched_attr`, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def answer_at_once() -> None:
    """Let this thread, which does next to nothing, run as soon as it is woken, where the kernel allows it; else `answer_soon`.

    For who tells of a death, between ranks that compute on the same cores. Children do not inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        answer_soon()


def answer_soon() -> None:
    """Ask the kernel for short slices for this thread: woken, it waits for a core less long; its share stays the same.

    It needs no privilege, children do not inherit it, and a kernel before 6.12, which knows slices of one length only, takes no
    notice.
    """
    if _SCHED_SETATTR is not None:
        attributes = _SchedulingAttributes(
            size=ctypes.sizeof(_SchedulingAttributes),
            policy=os.SCHED_OTHER,
            flags=_RESET_ON_FORK,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            runtime_ns=_SLICE_NS,
        )
        ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, ctypes.byref(attributes), 0)


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
    """None where the kernel does not tell."""
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
