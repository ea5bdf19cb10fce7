"""The deciding part of a recorded run, fed again from its log.

What the live controller gave to `Adaptation` is in the log: its site and options (`AdaptationStarted`), the committed
iterations, and, each with its watermark (how many iterations had been judged by then), the faults announced, the ranks lost,
the measurements of ranks on standby, and the plans issued and applied. The control stream is walked in its order; before an
event with watermark w all iterations below w are observed.
"""

from __future__ import annotations

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop.adaptation import Adaptation, AdaptationStep
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DeviceLost,
    Event,
    FaultInjected,
    PlanApplied,
    PlanIssued,
    PlanKept,
    PlanProposed,
    PlanScored,
    PredictorFitted,
    Probed,
    Regrouped,
    RunFinished,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
)


class ReplayError(ValueError):
    """A log that cannot be replayed; the message says what it lacks."""


def started_of(recorded: RecordedRun) -> AdaptationStarted:
    """What the run's deciding part was given. Raises `ReplayError` when the log does not say."""
    for noted in recorded.control:
        if isinstance(noted.event, AdaptationStarted):
            return noted.event
    raise ReplayError(
        f"run {recorded.run} cannot be replayed: its log has no adaptation_started event "
        "(it was imported, or run by an older version)"
    )


class Rehearsal:
    """The adaptation of a recorded run, fed again; `made` is all that it said."""

    def __init__(self, recorded: RecordedRun) -> None:
        started = started_of(recorded)
        try:
            self.adaptation = Adaptation.like(started)
        except (msgspec.ValidationError, ValueError) as error:
            raise ReplayError(f"run {recorded.run} was decided by other options than this code knows: {error}") from error
        self._control = [noted.event for noted in recorded.control]
        # What the ranks of a run that goes on, or that lost its controller, committed and nobody judged was not decided upon.
        judged = max((*recorded.judged, *map(moment_of, self._control)), default=-1)
        self._iterations = [one for one in recorded.iterations() if one.committed.iteration <= judged]
        if not self._iterations:
            raise ReplayError(f"run {recorded.run} cannot be replayed: no iteration was committed")
        if self.first > 0:
            raise ReplayError(
                f"run {recorded.run} cannot be replayed: its telemetry begins at iteration {self.first}, "
                "what came before is pruned"
            )
        self._plans = recorded.plans
        self._next = 0
        self._issued: list[PlanIssued] = []
        self._in_force: int | None = None
        self._lost: DeviceLost | None = None
        self.made: list[Event] = []
        self.alive = set(self.adaptation.site.origin.ranks)
        self.plan = self.adaptation.site.origin

    @property
    def first(self) -> int:
        return self._iterations[0].committed.iteration

    @property
    def last(self) -> int:
        return self._iterations[-1].committed.iteration

    @property
    def in_force(self) -> Plan:
        """The plan that every living member acted on last; `plan` is that of the last iteration."""
        return self._plans[self._in_force or 0]

    def run(self, until: int) -> None:
        """Up to and including iteration `until`."""
        for place, event in enumerate(self._control):
            watermark = watermark_of(event)
            if watermark is not None:
                if watermark > until + 1:
                    break
                self._observe_below(watermark)
            self._take(place, event)
        self._observe_below(until + 1)
        if until == self.last and any(isinstance(event, RunFinished) and event.status == "done" for event in self._control):
            self.made += self.adaptation.finish()

    def observe(self, released: IterationTelemetry, plan: Plan) -> AdaptationStep:
        """What the adaptation says to one iteration; a subclass may look on."""
        return self.adaptation.observe(released, plan)

    def _observe_below(self, watermark: int) -> None:
        while self._next < len(self._iterations) and self._iterations[self._next].committed.iteration < watermark:
            released = self._iterations[self._next]
            self._next += 1
            iteration, self.plan = released.committed.iteration, self._plans[released.committed.plan_version]
            step = self.observe(released, self.plan)
            self.made += [step.judged, *step.events]
            under_way = bool(self._issued) and self._issued[-1].plan_version != self.plan.plan_version
            if not under_way and iteration + 1 < self.adaptation.site.iterations:
                self.made += _answer(step, iteration, self.plan)

    def _take(self, place: int, event: Control) -> None:
        if isinstance(event, FaultInjected):
            self.adaptation.injected(event)
        elif isinstance(event, DeviceLost):
            self.alive.discard(event.rank)
            self._lost = event
            suspect = Suspect(rank=event.rank, how=event.how, detail=event.detail, victims=event.victims)
            self.made += self.adaptation.lost(suspect, event.iteration or 0)
        elif isinstance(event, StandbyMeasured):
            self.made += self.adaptation.measured(event.rank, event.iteration, event.product_us, event.watermark)
        elif isinstance(event, PlanProposed) and not event.optional:
            self._recover(event)
        elif isinstance(event, PlanIssued):
            self._issued.append(event)
        elif isinstance(event, PlanApplied):
            self._in_force = event.plan_version
            regrouped = next(
                one for one in self._control[place:] if isinstance(one, Regrouped) and one.plan_version == event.plan_version
            )
            self.made += self.adaptation.applied(
                self._plans[event.plan_version], event.proposal, regrouped, old=self._replaced(event.plan_version)
            )

    def _replaced(self, plan_version: int) -> Plan | None:
        """The plan that plan `plan_version` replaced by choice."""
        chosen = any(issued.plan_version == plan_version and issued.optional and issued.proposal for issued in self._issued)
        return self._plans[plan_version - 1] if chosen else None

    def _recover(self, recorded: PlanProposed) -> None:
        """The minimal recovery again: from the plan in force, or from a recovery that was under way."""
        assert self._lost is not None
        base = self._plans[self._in_force or 0]
        if self._issued and self._issued[-1].plan_version > base.plan_version and not self._issued[-1].optional:
            base = self._plans[self._issued[-1].plan_version]
        try:
            plan = recover(base, {self._lost.rank}, recorded.plan_version)
        except PlanError:
            return
        expected_us = self.adaptation.expected_us(plan)
        self.made.append(
            msgspec.structs.replace(
                recorded,
                digest=plan.digest,
                plan=plan.to_data(),
                predicted_us=None if expected_us is None else round(expected_us),
            )
        )


def _answer(step: AdaptationStep, iteration: int, plan: Plan) -> list[Event]:
    """What the controller makes of the Scheduler's answer (runtime/control/approval_queue.py), less the proposal's name.

    A probe is no answer: what it measures is in the log, and comes with a later iteration.
    """
    if step.probe is not None:
        return []
    found = step.proposal
    if found is None:
        kept = PlanKept(plan_version=plan.plan_version, at_iteration=iteration, reason=step.reason, verdict=step.verdict)
        return [kept] if step.reason else []
    return [found.event("", verdict=step.verdict, reason=step.reason, at_iteration=iteration, old=plan)]


_MARKED = (FaultInjected, DeviceLost, StandbyMeasured, PlanIssued, PlanApplied)


def watermark_of(event: Control) -> int | None:
    """How many iterations had been judged when this came; None where an event does not say."""
    return event.watermark if isinstance(event, _MARKED) else None


_LOSSES = ("dead", "hung")


def moment_of(event: Control) -> int:
    """The iteration after whose judgement an event came, or before whose successor's; -1 = it does not tell."""
    watermark = watermark_of(event)
    if watermark is not None:
        return watermark - 1
    match event:
        case PredictorFitted():
            return event.watermark
        case PlanScored():
            return event.to_iteration
        case VerdictClosed() | PlanKept() | Probed():
            return event.at_iteration
        case Verdict() | PlanProposed():
            # Of a loss they tell the iteration that the rank was in.
            lost = event.cause in _LOSSES if isinstance(event, Verdict) else not event.optional
            return -1 if lost else event.at_iteration
        case _:
            return -1
