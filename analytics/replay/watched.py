"""The rules of a training that is not ours (loop/watched/attached_rules.py), fed again from its log.

What the watching process gave to them is there: the plan that it found, why nobody could be judged by it, the committed
iterations, each under the plan that its ranks followed, and with the number of iterations judged by then who died or hung.
What was proposed, and what became of it, is taken from the log: when a rank said what its loop offers is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.next_steps import answers_probes
from unskew.analytics.detector.options import DetectorOptions, options_for
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.watched import attached_rules as rules
from unskew.analytics.replay.causes import ReplayError, causes_of, judged_iterations, started_of
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.analytics.replay.rehearsal import ControllerRehearsal, Rehearsal
from unskew.collector.events import Control, DetectionLimit, DeviceLost, Event, IterationJudged, Verdict, VerdictClosed


class WatchedRehearsal(Rehearsal):
    """As far as `control` goes; a diagnosis hands over only who was lost, dated anew where the log does not."""

    def __init__(
        self,
        control: Sequence[Control],
        iterations: Sequence[IterationTelemetry],
        plans: Mapping[int, Plan],
        options: DetectorOptions,
        *,
        can_be_probed: bool,
    ) -> None:
        super().__init__(control, iterations)
        blind = (event for event in control if isinstance(event, DetectionLimit) and event.at_iteration == 0)
        self._plans, self._dead, self._hung = plans, set[int](), set[int]()
        why_not = next((event.why for event in blind), "")
        self.state, first = rules.begin(plans[0], why_not, options, can_be_probed=can_be_probed)
        self.made += first

    @property
    def monitor(self) -> Monitor:
        return self.state.monitor

    @property
    def plan(self) -> Plan:
        return self.state.plan

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.state.plan.ranks if rank not in self._dead)

    @property
    def truth_known(self) -> bool:
        return False

    def judged_before(self, event: Control) -> int | None:
        match event:
            case DeviceLost():
                return event.watermark
            case Verdict(cause="hung"):
                return event.at_iteration
        return None

    def observe(self, released: IterationTelemetry) -> IterationJudged:
        version = released.committed.plan_version
        if version != self.plan.plan_version and version in self._plans:
            self._follow(rules.applied(self.state, self._plans[version], released.committed.iteration))
        made = self._follow(rules.committed(self.state, released))
        return next(one for one in made if isinstance(one, IterationJudged))

    def take(self, place: int, event: Control) -> None:  # noqa: ARG002 - what comes later does not matter here
        match event:
            case DeviceLost():
                self._dead.add(event.rank)
                self._follow(rules.lost(self.state, Suspect.of(event), event.iteration or 0))
            case Verdict(cause="hung"):
                self._hung.add(event.verdict)
                self._follow(rules.lost(self.state, _suspect(event), event.at_iteration))
            case VerdictClosed() if event.verdict in self._hung:
                self.made.append(event)

    def end(self) -> None:
        self._follow(rules.ended(self.state))

    def _follow(self, outcome: tuple[rules.AttachedState, Sequence[Event]]) -> Sequence[Event]:
        self.state, made = outcome
        self.made += made
        return made


def rehearsal_of(recorded: RecordedRun) -> Rehearsal:
    """Of one of our own runs, or one that was watched. Raises `ReplayError` when the log does not have all of it."""
    if not recorded.attached:
        return ControllerRehearsal(*causes_of(recorded))
    iterations, plans = judged_iterations(recorded), recorded.plans
    if not iterations or 0 not in plans:
        raise ReplayError(f"run {recorded.run} cannot be replayed: no iteration of all its ranks was committed")
    control = [noted.event for noted in recorded.control]
    probes = recorded.started is not None and answers_probes(recorded.started.device_kind, len(plans[0].ranks))
    return WatchedRehearsal(control, iterations, plans, options_of(recorded), can_be_probed=probes)


def options_of(recorded: RecordedRun) -> DetectorOptions:
    """The thresholds of the run."""
    if recorded.attached and recorded.started is not None:
        return options_for(recorded.started.device_kind)
    return Adaptation.like(started_of(recorded)).site.detector


def _suspect(verdict: Verdict) -> Suspect:
    """Who hangs, as its verdict has it."""
    (culprit,), victims = verdict.culprits, (party.rank for party in verdict.victims)
    return Suspect(
        rank=culprit.rank or 0,
        how="hung",
        detail=str(verdict.evidence.get("detail", "")),
        victims=tuple(rank for rank in victims if rank is not None),
    )
