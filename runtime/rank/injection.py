"""Carries out this rank's faults: real signals to its own process, at the place that the SPEC names, announced first."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from math import inf

from unskew.analytics.core.faults import KillPoint
from unskew.collector.events import Fault


class InjectedError(RuntimeError):
    """What `exception` raises in a rank."""


class Injector:
    """Strikes this rank when its time has come; slow devices and links are the device's and the links', and only announced
    here."""

    def __init__(self, faults: Sequence[Fault], rank: int, seed: int, announce: Callable[[Fault, int], None]) -> None:
        own = [fault for fault in faults if fault.rank == rank and fault.kind != "rejoin"]
        self._faults = [fault for fault in own if fault.strikes]
        self._lasting = [fault for fault in own if not fault.strikes]
        self._disks = [fault for fault in own if fault.kind == "full_disk"]
        self._disk_is_full = False
        self._announce = announce
        self._random = random.Random(f"{seed}/{rank}")

    def begin(self, iteration: int) -> None:
        """Called before each attempt at an iteration."""
        for fault in [fault for fault in self._lasting if fault.at_iteration <= iteration]:
            self._lasting.remove(fault)
            self._announce(fault, iteration)
        full = any(fault.strength(iteration) for fault in self._disks)
        if full != self._disk_is_full:
            self._disk_is_full = full
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def on_standby(self, iteration: int) -> None:
        """Called when a rank without a role learns how far the others are: what was due by now happens now."""
        self.begin(iteration)
        for fault in [fault for fault in self._faults if fault.at_iteration <= iteration]:
            self._carry_out(fault, iteration)

    def before_action(self, iteration: int, index: int, kinds: Sequence[str]) -> None:
        """Called before each chunk, of those of `kinds`; the moment within the iteration is random, from (seed, rank)."""
        for fault in [fault for fault in self._faults if fault.at_iteration == iteration and fault.point in (None, "compute")]:
            left = [kind for kind in kinds[index:] if fault.phase in (None, kind)]
            if not left or (fault.phase in (None, kinds[index]) and self._random.randrange(len(left)) == 0):
                self._carry_out(fault, iteration)

    def at(self, iteration: int, point: KillPoint) -> None:
        """Called in each window of the commit."""
        for fault in [fault for fault in self._faults if fault.at_iteration == iteration and fault.point == point]:
            self._carry_out(fault, iteration)

    def _carry_out(self, fault: Fault, iteration: int) -> None:
        self._faults.remove(fault)
        self._announce(fault, iteration)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                _hang(inf if fault.seconds is None else fault.seconds)
            case "freeze":
                if fault.seconds is not None:
                    _wake(os.getpid(), fault.seconds)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                raise InjectedError(f"injected in iteration {iteration}")
            case "segfault":
                resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
                ctypes.string_at(0)


def _hang(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, 3600.0))


def _wake(pid: int, seconds: float) -> None:
    """Let another process continue this one, which cannot do it itself."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}"], start_new_session=True)
