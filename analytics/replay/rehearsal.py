"""The deciding part of one of our own recorded runs, fed again from its log (watched.py: of one that is not ours).

What the live controller gave to its rules is in the log: site and options (`AdaptationStarted`), the committed iterations, and,
each with its watermark (how many iterations had been judged by then), the faults announced, the ranks lost, the measurements of
ranks on standby, and the plans issued and applied. The control stream is walked in its order; before an event with watermark w
all iterations below w are observed. The rules decide again; which plans and approvals followed is taken from the log.

A replay and a backtest begin with the adaptation that the run had (`causes_of`), a diagnosis with today's thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop import controller_rules as rules
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DetectionLimit,
    DeviceJoined,
    DeviceLost,
    Event,
    FaultInjected,
    IterationJudged,
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
    Regrouped,
    RunFinished,
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
        raise ReplayError(f"run {recorded.run} was decided by other options than this code knows: {error}") from error
    control, iterations = [noted.event for noted in recorded.control], judged_iterations(recorded)
    first = iterations[0].committed.iteration if iterations else adaptation.site.first_iteration
    if first > adaptation.site.first_iteration:
        raise ReplayError(
            f"run {recorded.run} cannot be replayed: its telemetry begins at iteration {first}, what came before is pruned"
        )
    return control, iterations, adaptation


class Walk:
    """What happened in a run, in its order: its control events, and before each the iterations that had been judged by then.
    `made` is all that was decided to be logged. `onlooker` is shown each iteration, the predictor that judged it,
    and the judgement."""

    def __init__(self, control: Sequence[Control], iterations: Sequence[IterationTelemetry]) -> None:
        self._control, self._iterations = control, iterations
        self._next = 0
        self.made: list[Event] = []
        self.onlooker: Callable[[IterationTelemetry, Fit | None, IterationJudged], None] = lambda *_: None

    @property
    def monitor(self) -> Monitor:
        """What is known of the devices by now."""
        raise NotImplementedError

    @property
    def first(self) -> int:
        return self._iterations[0].committed.iteration

    @property
    def last(self) -> int:
        return self._iterations[-1].committed.iteration

    def run(self, until: int | None = None) -> None:
        """Up to and including iteration `until`; None = all of it."""
        end = inf if until is None or until >= self.last else until + 1
        for place, event in enumerate(self._control):
            if (judged := self.judged_before(event)) is not None:
                if judged > end:
                    break
                self._observe_below(judged)
            self.take(place, event)
        self._observe_below(end)
        if end == inf:
            self.end()

    def judged_before(self, event: Control) -> int | None:
        """How many iterations are to be observed before an event is taken; None where it does not matter."""
        if isinstance(event, PlanProposed) and event.optional:
            return event.at_iteration + 1
        return watermark_of(event)

    def observe(self, released: IterationTelemetry) -> IterationJudged:
        """Give the rules one iteration."""
        raise NotImplementedError

    def take(self, place: int, event: Control) -> None:
        """What a control event, at its place among them, tells of the world."""
        raise NotImplementedError

    def end(self) -> None:
        """Nothing more came."""

    def _observe_below(self, watermark: float) -> None:
        while self._next < len(self._iterations) and self._iterations[self._next].committed.iteration < watermark:
            released = self._iterations[self._next]
            self._next += 1
            fitted = self.monitor.fitted
            self.onlooker(released, fitted, self.observe(released))


class Rehearsal(Walk):
    """The controller's rules fed again."""

    def __init__(self, control: Sequence[Control], iterations: Sequence[IterationTelemetry], adaptation: Adaptation) -> None:
        super().__init__(control, iterations)
        self.state = rules.ControllerState.begin(adaptation)

    @property
    def monitor(self) -> Monitor:
        return self.state.adaptation.monitor

    @property
    def plan(self) -> Plan:
        """In force."""
        return self.state.plans.in_force

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self.state.alive))

    @property
    def truth_known(self) -> bool:
        return self.state.adaptation.site.truth_known

    def observe(self, released: IterationTelemetry) -> IterationJudged:
        return next(one for one in self._follow(rules.committed(self.state, released)) if isinstance(one, IterationJudged))

    def end(self) -> None:
        if any(isinstance(event, RunFinished) and event.status in ("done", "incomplete") for event in self._control):
            self._follow(rules.finished(self.state))

    def take(self, place: int, event: Control) -> None:
        """For the rules; then the event itself, as it is in the log."""
        match event:
            case FaultInjected():
                self._follow(rules.injected(self.state, event))
            case DeviceLost():
                self._follow(rules.lost(self.state, event))
            case StandbyMeasured():
                self._follow(rules.measured(self.state, event))
            case PlanApplied():
                later = (one for one in self._control[place:] if isinstance(one, Regrouped))
                regrouped = next((one for one in later if one.plan_version == event.plan_version), None)
                if regrouped is not None:
                    self._follow(rules.applied(self.state, event, regrouped))
        self.state = self.state.take(event)

    def _follow(self, outcome: rules.Outcome) -> list[Event]:
        """Note what was decided; the state goes on without it, but with what was learned."""
        after, decisions = outcome
        self.state = msgspec.structs.replace(self.state, adaptation=after.adaptation, committed=after.committed)
        made: list[Event] = []
        for decision in decisions:
            made += [decision] if isinstance(decision, IterationJudged) else []
            made += decision.events if isinstance(decision, rules.Log) else []
        self.made += made
        return made


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
