"""Carries out this rank's faults: real signals to its own process, at the place that the SPEC names, announced first."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from unskew.analytics.core.faults import FaultSpec, KillPoint


class Injector:
    """Ends this rank when its time has come; slow faults are the device's, and only announced here."""

    def __init__(self, faults: Sequence[FaultSpec], rank: int, seed: int, announce: Callable[[FaultSpec, int], None]) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank and fault.ends_rank]
        self._slow = [fault for fault in faults if fault.rank == rank and not fault.ends_rank]
        self._announce = announce
        self._random = random.Random(f"{seed}/{rank}")

    def begin(self, iteration: int) -> None:
        """Called before each attempt at an iteration."""
        for fault in [fault for fault in self._slow if fault.at <= iteration]:
            self._slow.remove(fault)
            self._announce(fault, iteration)

    def on_standby(self, iteration: int) -> None:
        """Called when a rank without a role learns how far the others are: what was due by now happens now."""
        self.begin(iteration)
        for fault in self._faults:
            if fault.at <= iteration:
                self._carry_out(fault, iteration)

    def before_action(self, iteration: int, index: int, n_actions: int) -> None:
        """Called before each chunk; the moment within the iteration is random, from (seed, rank)."""
        for fault in self._faults:
            if fault.at == iteration and fault.point in (None, "compute") and self._random.randrange(n_actions - index) == 0:
                self._carry_out(fault, iteration)

    def at(self, iteration: int, point: KillPoint) -> None:
        """Called in each window of the commit."""
        for fault in self._faults:
            if fault.at == iteration and fault.point == point:
                self._carry_out(fault, iteration)

    def _carry_out(self, fault: FaultSpec, iteration: int) -> None:
        self._announce(fault, iteration)
        if fault.kind == "hang":
            while True:
                time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
