"""Rules fed again with what the log says that they were given: the walk through a log, and that with our controller's rules.

The control stream is walked in its order; before an event with watermark w all iterations below w are observed. The rules
decide again; which plans and approvals followed is taken from the log. watched.py has a training that is not ours.

A replay and a backtest begin with the adaptation that the run had (causes.py), a diagnosis with today's thresholds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop import controller_rules as rules
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.controller_state import ControllerState, Log, Outcome
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.replay.causes import watermark_of
from unskew.collector.events import (
    Control,
    DeviceLost,
    Event,
    FaultInjected,
    IterationJudged,
    PlanApplied,
    PlanProposed,
    Regrouped,
    RunFinished,
    StandbyMeasured,
)


class Rehearsal(ABC):
    """What happened in a run, in its order: its control events, and before each the iterations that had been judged by then.

    `made` is all that was decided to be logged. `onlooker` is shown each iteration, the predictor that judged it, and the
    judgement.
    """

    def __init__(self, control: Sequence[Control], iterations: Sequence[IterationTelemetry]) -> None:
        self._control, self._iterations = control, iterations
        self._next = 0
        self.made: list[Event] = []
        self.onlooker: Callable[[IterationTelemetry, Fit | None, IterationJudged], None] = lambda *_: None

    @property
    @abstractmethod
    def monitor(self) -> Monitor:
        """What is known of the devices by now."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """In force."""

    @property
    @abstractmethod
    def alive(self) -> tuple[int, ...]:
        """The ranks that nothing is known to have ended."""

    @property
    @abstractmethod
    def truth_known(self) -> bool:
        """Whether the log names the faults, so that verdicts can be scored against them."""

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

    @abstractmethod
    def observe(self, released: IterationTelemetry) -> IterationJudged:
        """Give the rules one iteration."""

    @abstractmethod
    def take(self, place: int, event: Control) -> None:
        """Give the rules what a control event, at its place among them, reports of the world."""

    @abstractmethod
    def end(self) -> None:
        """Give the rules the end of the log."""

    def _observe_below(self, watermark: float) -> None:
        while self._next < len(self._iterations) and self._iterations[self._next].committed.iteration < watermark:
            released = self._iterations[self._next]
            self._next += 1
            fitted = self.monitor.fitted
            self.onlooker(released, fitted, self.observe(released))


class ControllerRehearsal(Rehearsal):
    """The controller's rules fed again."""

    def __init__(self, control: Sequence[Control], iterations: Sequence[IterationTelemetry], adaptation: Adaptation) -> None:
        super().__init__(control, iterations)
        self.state = ControllerState.begin(adaptation)

    @property
    def monitor(self) -> Monitor:
        return self.state.adaptation.monitor

    @property
    def plan(self) -> Plan:
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

    def _follow(self, outcome: Outcome) -> list[Event]:
        """Note what was decided; the state goes on without it, but with what was learned."""
        after, decisions = outcome
        self.state = msgspec.structs.replace(self.state, adaptation=after.adaptation, committed=after.committed)
        made: list[Event] = []
        for decision in decisions:
            made += [decision] if isinstance(decision, IterationJudged) else []
            made += decision.events if isinstance(decision, Log) else []
        self.made += made
        return made
