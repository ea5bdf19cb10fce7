"""What the rules of a recorded run of ours were given, and when: taken from its log for all that decides again.

That is site and options (`AdaptationStarted`), the committed iterations, and, each with its watermark (how many iterations had
been judged by then), the faults announced, the ranks lost, the measurements of ranks on standby, and the plans issued and
applied.
"""

from __future__ import annotations

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.collector.decoding import complaint
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DetectionLimit,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    ModeChanged,
    PlanApplied,
    PlanIssued,
    PlanKept,
    PlanProposed,
    PlanScored,
    PredictorFitted,
    Probed,
    ProcessEnded,
    RankAdded,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
)


class ReplayError(ValueError):
    """A log that cannot be replayed; the message names what it lacks."""


def judged_iterations(recorded: RecordedRun) -> list[IterationTelemetry]:
    """Those that were decided upon; what the ranks of a run that goes on, or that lost its controller, committed and nobody
    judged is none of them."""
    judged = max((*recorded.judged, *(moment_of(noted.event) for noted in recorded.control)), default=-1)
    return [one for one in recorded.iterations() if one.committed.iteration <= judged]


def started_of(recorded: RecordedRun) -> AdaptationStarted:
    """What the run's deciding part was given. Raises `ReplayError` when the log does not have it."""
    for noted in recorded.control:
        if isinstance(noted.event, AdaptationStarted):
            return noted.event
    raise ReplayError(
        f"run {recorded.run} cannot be replayed: its log has no adaptation_started event "
        "(it was run by an older version, or is no run)"
    )


def causes_of(recorded: RecordedRun) -> tuple[list[Control], list[IterationTelemetry], Adaptation]:
    """What the rules of a recorded run decided upon: its control events, the iterations judged, and with what they began.

    Raises `ReplayError` when the log does not have all of it.
    """
    control, iterations, adaptation = causes_so_far(recorded)
    if not iterations:
        raise ReplayError(f"run {recorded.run} cannot be replayed: no iteration was committed")
    return control, iterations, adaptation


def causes_so_far(recorded: RecordedRun) -> tuple[list[Control], list[IterationTelemetry], Adaptation]:
    """The same of a run that goes on, whose first iteration may not have been judged yet."""
    started = started_of(recorded)
    try:
        adaptation = Adaptation.like(started)
    except (msgspec.ValidationError, ValueError) as error:
        raise ReplayError(f"run {recorded.run} was decided by options unknown to this code: {complaint(error)}") from error
    control, iterations = [noted.event for noted in recorded.control], judged_iterations(recorded)
    first = iterations[0].committed.iteration if iterations else adaptation.site.first_iteration
    if first > adaptation.site.first_iteration:
        raise ReplayError(
            f"run {recorded.run} cannot be replayed: its telemetry begins at iteration {first}, what came before is pruned"
        )
    return control, iterations, adaptation


_MARKED = (
    FaultInjected, RankAdded, DeviceJoined, DeviceLost, ProcessEnded, StandbyMeasured, PlanIssued, PlanApplied, ModeChanged,
)  # fmt: skip


def watermark_of(event: Control) -> int | None:
    """How many iterations had been judged when this came; None where an event does not record it."""
    return event.watermark if isinstance(event, _MARKED) else None


_LOSSES = ("dead", "hung")


def moment_of(event: Control) -> int:
    """The iteration after whose judgement an event came, or before whose successor's; -1 = unknown."""
    watermark = watermark_of(event)
    if watermark is not None:
        return watermark - 1
    match event:
        case PredictorFitted():
            return event.watermark
        case PlanScored():
            return event.to_iteration
        case VerdictClosed() | PlanKept() | Probed() | DetectionLimit():
            return event.at_iteration
        case Verdict() | PlanProposed():
            # Of a loss they record the iteration that the rank was in.
            lost = event.cause in _LOSSES if isinstance(event, Verdict) else not event.optional
            return -1 if lost else event.at_iteration
        case _:
            return -1
