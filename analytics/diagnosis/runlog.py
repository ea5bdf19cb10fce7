"""What a diagnosis reads of a run, as plain data: no matter whether it ran here or was imported, lives or is long over."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.collector.events import CollectiveRecorded, DeviceLost, FaultInjected, GroupRecorded


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `released`: committed iterations with chunks, in order, each under `plans[its epoch]` (our own runs only).

    `iterations`: iteration, iteration_us (all iterations whose time is known, in order). `spans`: of the attempts that counted.
    `commits`: iteration, epoch, rank, start_us, wall_us. `operations`: rows of an imported NDTimeline trace. `flights`,
    `flight_groups`: entries of flight recorders. `regrouped_s`: epoch -> seconds from the detection until all survivors held
    groups again. `classes`: device class -> its ranks.
    """

    run: str
    device: str
    clock: str
    options: dict[str, Any]
    ranks: int
    iterations: pl.DataFrame
    spans: pl.DataFrame
    commits: pl.DataFrame
    plans: dict[int, Plan] = {}
    released: tuple[IterationTelemetry, ...] = ()
    lost: tuple[DeviceLost, ...] = ()
    regrouped_s: dict[int, float] = {}
    faults: tuple[FaultInjected, ...] = ()
    operations: pl.DataFrame | None = None
    flights: tuple[CollectiveRecorded, ...] = ()
    flight_groups: tuple[GroupRecorded, ...] = ()
    classes: dict[str, tuple[int, ...]] = {}

    @property
    def imported(self) -> bool:
        return self.clock == "imported"

    @property
    def emulated(self) -> bool:
        """Whether chunk times are slept or on a logical clock; `device` begins with its kind."""
        return self.device.startswith(("sleep", "virtual"))

    @property
    def on_cores(self) -> bool:
        """Whether ranks compute on CPU cores."""
        return self.device.startswith("real") and "GPU" not in self.device
