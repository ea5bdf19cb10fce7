"""What a diagnosis reads of a run, as plain data: no matter whether it ran here or was imported, lives or is long over."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import polars as pl

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.detector.next_steps import answers_probes
from unskew.analytics.diagnosis.sample import Sample
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.collector.events import CollectiveRecorded, Control, DeviceJoined, DeviceKind, DeviceLost, GroupRecorded, Regrouped

End = Literal["running", "done", "failed", "stopped", "incomplete", "lost"]

NO_STEPS = pl.DataFrame(schema=dict.fromkeys(("iteration", "rank", "start_us", "wall_us"), pl.Int64))


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `trace`: its operations, of the attempts that counted. `released`: committed iterations with the lengths of
    their micro-batches, in order, each under `plans[its plan_version]` (our own runs only). `control`: what befell the run and
    what was decided, in order.

    `works`: iteration -> micro-batch -> its work, of a run of ours that was exported and imported.
    `iterations`: iteration, iteration_us (all iterations whose time is known, in order). `steps`: iteration, rank, start_us,
    wall_us, where a source times them rank by rank. `flights`, `flight_groups`: entries of flight recorders.
    `end`: by its own last word; without one "running" where a controller holds it, else "lost".
    `gap`: what the log lacks by that word, "" = nothing; `dropped`: type -> events that full buffers dropped.
    `redone`: iterations that were executed again after another attempt.
    `sample`: the iterations of a long run that `trace`, `released` and `steps` hold; None = all.
    """

    run: str
    device_kind: DeviceKind | None
    clock: str
    options: dict[str, Any]
    ranks: int
    iterations: pl.DataFrame
    trace: Trace
    steps: pl.DataFrame = NO_STEPS
    plans: dict[int, Plan] = {}
    released: tuple[IterationTelemetry, ...] = ()
    works: dict[int, dict[int, Work]] = {}
    control: tuple[Control, ...] = ()
    flights: tuple[CollectiveRecorded, ...] = ()
    flight_groups: tuple[GroupRecorded, ...] = ()
    end: End = "done"
    end_reason: str = ""
    gap: str = ""
    dropped: dict[str, int] = {}
    redone: tuple[int, ...] = ()
    sample: Sample | None = None

    @property
    def failure(self) -> str:
        """How it failed, without a full stop; "" = it did not."""
        return f"the run failed: {self.end_reason or 'no reason given'}" if self.end == "failed" else ""

    @property
    def status(self) -> str:
        """The run's in this log, as the view `runs` has it."""
        return "unfinished" if self.end in {"running", "lost"} else self.end

    @property
    def imported(self) -> bool:
        return self.clock == "imported"

    @property
    def attached(self) -> bool:
        """Whether it is a training that is not ours, watched while it ran."""
        return "command" in self.options

    @property
    def can_be_probed(self) -> bool:
        """Whether `unskew probe` is answered: the run goes on, and is not a training of others on GPUs or of one rank."""
        answered = not self.attached or answers_probes(self.device_kind, self.ranks)
        return self.end == "running" and not self.imported and answered

    @property
    def times_messages(self) -> bool:
        """Whether messages between its emulated devices say when they arrive, as this version's do."""
        return self.device_kind in {"sleep", "virtual"} and "sends" in self.options

    @property
    def blocking_sends(self) -> bool:
        return self.options.get("sends") == "blocking"

    @property
    def lost(self) -> tuple[DeviceLost, ...]:
        return tuple(event for event in self.control if isinstance(event, DeviceLost))

    @property
    def regrouped_s(self) -> dict[int, float]:
        """Plan version -> seconds from the detection until all survivors held groups again."""
        return {event.plan_version: event.seconds for event in self.control if isinstance(event, Regrouped)}

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """Device class -> its ranks."""
        joined = [event for event in self.control if isinstance(event, DeviceJoined)]
        of_rank = {event.rank: event.device_class for event in joined if event.device_class}
        names = sorted({*of_rank.values()})
        return {name: tuple(sorted(rank for rank, own in of_rank.items() if own == name)) for name in names}
