"""A recorded run as its log has it: control events in the order of their stream, telemetry in each writer's order.

The order in which files were read, sealed or collected leaves no trace here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.run_state import LoggedControl
from unskew.analytics.loop.intake import Intake
from unskew.collector.events import (
    Control,
    Event,
    GpuState,
    IterationCommitted,
    IterationJudged,
    MicroBatchPacked,
    PlanApplied,
    PlanIssued,
    RunStarted,
    Span,
)
from unskew.collector.files.tail import decode_event

_PATIENCE_POLLS = 32


class RecordedRun(msgspec.Struct, frozen=True):
    """`judged_us`: when each iteration was judged, by the clock of `LoggedControl.at_us`."""

    run: str
    control: tuple[LoggedControl, ...]
    telemetry: tuple[Event, ...]
    judged: dict[int, IterationJudged]
    judged_us: dict[int, int]

    @property
    def plans(self) -> dict[int, Plan]:
        """Every plan that was issued, by its version."""
        return {
            noted.event.plan_version: Plan.from_data(noted.event.plan)
            for noted in self.control
            if isinstance(noted.event, (PlanIssued, PlanApplied))
        }

    @property
    def started(self) -> RunStarted | None:
        return next((noted.event for noted in self.control if isinstance(noted.event, RunStarted)), None)

    @property
    def attached(self) -> bool:
        """Whether it is a training that is not ours, watched while it ran."""
        return self.started is not None and "command" in self.started.options

    def iterations(self) -> list[IterationTelemetry]:
        """The committed iterations as the live run judged them, in order.

        The live run waited for late lines only so long: an iteration that it gave up as incomplete is so here, and the time it
        measured is the one that it knew.
        """
        first = self.started.first_iteration if self.started else 0
        intake, plans = Intake(first, marks_suffice=self.attached), self.plans
        released = intake.take(self.telemetry, plans)
        for _ in range(_PATIENCE_POLLS):
            released += intake.take((), plans)
        return [_as_judged(one, self.judged.get(one.committed.iteration)) for one in released]


def _as_judged(released: IterationTelemetry, judged: IterationJudged | None) -> IterationTelemetry:
    if judged is None:
        return released
    committed = msgspec.structs.replace(
        released.committed,
        log_complete=released.committed.log_complete and judged.log_complete,
        measured_us=float(judged.measured_us),
    )
    return msgspec.structs.replace(released, committed=committed)


def run_of_lines(run: str, lines: Iterable[tuple[str, int, int, str | None, bytes]]) -> RecordedRun:
    """From lines in any order: (writer, seq, at_us, stream, line as written). Only the run's own control stream is taken."""
    control: list[tuple[int, LoggedControl]] = []
    telemetry: list[tuple[str, int, Event]] = []
    judged: dict[int, IterationJudged] = {}
    judged_us: dict[int, int] = {}
    for writer, seq, at_us, stream, line in lines:
        event = decode_event(line)
        if isinstance(event, IterationJudged):
            judged[event.iteration], judged_us[event.iteration] = event, at_us
        elif isinstance(event, Control) and stream == f"run/{run}":
            control.append((seq, LoggedControl(at_us, event)))
        elif isinstance(event, (Span, MicroBatchPacked, IterationCommitted, GpuState)):
            telemetry.append((writer, seq, event))
    control.sort(key=lambda one: one[0])
    telemetry.sort(key=lambda one: one[:2])
    return RecordedRun(run, tuple(noted for _, noted in control), tuple(event for *_, event in telemetry), judged, judged_us)
