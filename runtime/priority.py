"""Who runs first where processes share cores: those that only listen, and report a death."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress

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

    For who reports a death, between ranks that compute on the same cores. Children do not inherit it. Where people have asked
    for another policy or for niceness, which the kernel would take from the children too, that stays.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            return
    answer_soon()


def answer_soon() -> None:
    """Ask the kernel for short slices for this thread: woken, it waits for a core less long; its share stays the same.

    It needs no privilege, children do not inherit it, and a kernel before 6.12, which knows slices of one length only, takes no
    notice.
    """
    if _SCHED_SETATTR is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        attributes = _SchedulingAttributes(
            size=ctypes.sizeof(_SchedulingAttributes),
            policy=os.SCHED_OTHER,
            flags=_RESET_ON_FORK,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            runtime_ns=_SLICE_NS,
        )
        ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, ctypes.byref(attributes), 0)
