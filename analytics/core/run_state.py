"""Folds a run's control events into the state of the run: for the terminal, the dashboard, the summary, replay and diagnosis.

Telemetry has no part in it, so it stays small (tens of events) however long the run is.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from unskew.analytics.core.plan import Plan, Role
from unskew.collector import events as ev
from unskew.collector.log_gap import log_gap, with_dropped

ProposalStatus = Literal["open", "approved", "rejected", "expired", "applied", "failed", "scored"]
_DECIDED: dict[type, ProposalStatus] = {
    type(None): "open", ev.PlanApproved: "approved", ev.PlanRejected: "rejected", ev.PlanExpired: "expired"
}  # fmt: skip
_K = TypeVar("_K")
_S = TypeVar("_S", bound=msgspec.Struct)
_changed = msgspec.structs.replace


class LoggedControl(msgspec.Struct, frozen=True):
    """A control event of the log; those of one append share `at_us` (wall clock)."""

    at_us: int
    event: ev.Control
    actor: str = ""


class VerdictRevision(msgspec.Struct, frozen=True):
    """What a verdict said from `at_us` on."""

    verdict: ev.Verdict
    at_us: int


class VerdictState(msgspec.Struct, frozen=True):
    """A verdict, each of its revisions and what became of it."""

    revisions: tuple[VerdictRevision, ...] = ()
    closed: ev.VerdictClosed | None = None
    scored: ev.VerdictScored | None = None

    @property
    def verdict(self) -> ev.Verdict:
        """As it was revised and closed in the end, since its onset: a revision dates what it changes."""
        latest, onset = self.revisions[-1].verdict, self.revisions[0].verdict.since_iteration
        until = latest.until_iteration if self.closed is None else self.closed.until_iteration
        return _changed(latest, since_iteration=onset, until_iteration=until)

    @property
    def onset(self) -> str:
        """Beside the sentence, which dates the last change of a verdict that was revised (a ramp)."""
        onset = self.verdict.since_iteration
        changed = self.revisions[-1].verdict.since_iteration != onset
        return f"first in iteration {onset}" if changed else f"since iteration {onset}"


class ProposalState(msgspec.Struct, frozen=True):
    """A proposal and what became of it; `answers` are the verdicts that it is for, `refused` is the last command about it that
    could not be carried out, `left`: auto leaves it to people, `note` the last that was noted about it."""

    proposed: ev.PlanProposed
    answers: frozenset[int] = frozenset()
    decision: ev.PlanApproved | ev.PlanRejected | ev.PlanExpired | None = None
    applied: ev.PlanApplied | None = None
    failed: ev.PlanFailed | None = None
    scored: ev.PlanScored | None = None
    refused: ev.CommandRefused | None = None
    left: bool = False
    note: ev.Note | None = None

    @property
    def status(self) -> ProposalStatus:
        """The last stage that it reached."""
        if self.failed is not None:
            return "failed"
        if self.scored is not None:
            return "scored"
        if self.applied is not None:
            return "applied"
        return _DECIDED[type(self.decision)]


class AppliedPlan(msgspec.Struct, frozen=True, dict=True):
    """A plan that came into force."""

    event: ev.PlanApplied

    @cached_property
    def plan(self) -> Plan:
        """Read from the event when it is first asked for: of a large job that takes milliseconds."""
        return Plan.from_data(self.event.plan)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts by number, proposals by name, scores by the plan's version, all else in the order of the log.

    `ranks`: how many the run has had, those that joined later included.
    `lost`: the last loss of each rank that neither joined again nor got a role in a plan since; `rejoined`: those that did.
    `dropped`: type -> how many of its events the log lacks because a buffer was full.
    """

    started: ev.RunStarted | None = None
    finished: ev.RunFinished | None = None
    mode: ev.Mode = "observe"
    ranks: int = 0
    verdicts: dict[int, VerdictState] = {}
    proposals: dict[str, ProposalState] = {}
    plans: tuple[AppliedPlan, ...] = ()
    lost: dict[int, ev.DeviceLost] = {}
    rejoined: frozenset[int] = frozenset()
    faults: tuple[ev.FaultInjected, ...] = ()
    predictors: tuple[ev.PredictorFitted, ...] = ()
    scores: dict[int, ev.PlanScored] = {}
    limit: ev.DetectionLimit | None = None
    diagnosed: ev.Diagnosed | None = None
    dropped: dict[str, int] = {}

    @property
    def plan(self) -> AppliedPlan | None:
        """The plan in force."""
        return self.plans[-1] if self.plans else None

    @property
    def last_roles(self) -> dict[int, Role]:
        """The last role of every rank that ever had one."""
        return {role.rank: role for applied in self.plans for role in applied.plan.roles}

    @property
    def open_verdicts(self) -> tuple[VerdictState, ...]:
        """The one revised last comes last."""
        found = (state for state in self.verdicts.values() if self.is_open(state))
        return tuple(sorted(found, key=lambda state: state.revisions[-1].at_us))

    @property
    def ended_verdicts(self) -> tuple[VerdictState, ...]:
        """Those that are over, the one revised last first."""
        found = [state for state in self.verdicts.values() if not self.is_open(state)]
        return tuple(sorted(found, key=lambda state: state.revisions[-1].at_us)[::-1])

    @property
    def open_proposals(self) -> tuple[ProposalState, ...]:
        return tuple(state for state in self.proposals.values() if state.status == "open")

    @property
    def waiting(self) -> ProposalState | None:
        """The proposal that waits for a person: in mode approve, and in mode auto one that a lasting limit of it refuses."""
        if self.finished is not None or self.mode == "observe":
            return None
        asked = self.mode == "approve"
        optional = (one for one in self.open_proposals if one.proposed.optional)
        return next((one for one in optional if asked or one.left), None)

    @property
    def by_urgency(self) -> tuple[VerdictState, ...]:
        """The open verdicts: those for which a proposal waits for a person, those that nothing answers, the others; of each the
        one revised last first."""
        waiting = self.waiting.answers if self.waiting is not None else frozenset()

        def urgency(state: VerdictState) -> tuple[bool, bool]:
            return state.verdict.verdict not in waiting, self.answer_to(state.verdict) is not None

        newest_first = self.open_verdicts[::-1]
        return tuple(sorted(newest_first, key=urgency))

    @property
    def log_gap(self) -> str:
        """What the log of a run that is over lacks, "" when it is whole."""
        return log_gap(self.started, self.finished)

    def is_open(self, state: VerdictState) -> bool:
        return self.holds(state.verdict)

    def holds(self, verdict: ev.Verdict) -> bool:
        """Whether a verdict is not closed, and not about dead ranks that have all rejoined."""
        back = verdict.cause == "dead" and verdict.culprits and all(party.rank in self.rejoined for party in verdict.culprits)
        return verdict.until_iteration is None and not back

    def answer_to(self, verdict: ev.Verdict) -> int | None:
        """The version of the last plan that was applied for a verdict."""
        applied = [state.applied for state in self.proposals.values() if verdict.verdict in state.answers]
        return next((one.plan_version for one in reversed(applied) if one is not None), None)


def fold(state: RunState, event: ev.Event | None, at_us: int = 0) -> RunState:
    """The state after one more event of the run's log; each stream in its own order. Of telemetry only what was dropped counts.

    >>> fold(RunState(), ev.ModeChanged(mode="auto", by="ann")).mode
    'auto'
    """
    if not isinstance(event, ev.Control):
        return _changed(state, dropped=with_dropped(state.dropped, event)) if isinstance(event, ev.Dropped) else state
    match event:
        case ev.RunStarted():
            state = _changed(state, started=event, mode=event.mode, ranks=event.ranks)
        case ev.RunFinished():
            state = _changed(state, finished=event)
        case ev.ModeChanged():
            state = _changed(state, mode=event.mode)
        case ev.FaultInjected():
            state = _changed(state, faults=(*state.faults, event))
        case ev.PredictorFitted():
            state = _changed(state, predictors=(*state.predictors, event))
        case ev.PlanScored():
            state = _changed(state, scores={**state.scores, event.plan_version: event})
        case ev.DetectionLimit():
            state = _changed(state, limit=event)
        case ev.Diagnosed():
            state = _changed(state, diagnosed=event)
        case ev.DeviceLost():
            others = {rank: loss for rank, loss in state.lost.items() if rank != event.rank}
            state = _changed(state, lost={**others, event.rank: event}, rejoined=state.rejoined - {event.rank})
        case ev.DeviceJoined():
            state = _with_back(_changed(state, ranks=max(state.ranks, event.rank + 1)), {event.rank})
        case ev.PlanApplied():
            plans = (*state.plans, AppliedPlan(event))
            state = _with_back(_changed(state, plans=plans), plans[-1].plan.ranks if state.lost else ())
    return _changed(state, verdicts=_verdicts(state.verdicts, event, at_us), proposals=_proposals(state, event))


def _verdicts(states: dict[int, VerdictState], event: ev.Control, at_us: int) -> dict[int, VerdictState]:
    match event:
        case ev.Verdict():
            before = states.get(event.verdict, VerdictState())
            return {**states, event.verdict: _changed(before, revisions=(*before.revisions, VerdictRevision(event, at_us)))}
        case ev.VerdictClosed():
            return _known(states, event.verdict, closed=event)
        case ev.VerdictScored():
            return _known(states, event.verdict, scored=event)
    return states


def _proposals(state: RunState, event: ev.Control) -> dict[str, ProposalState]:
    states = state.proposals
    match event:
        case ev.PlanProposed():
            states = {**states, event.proposal: ProposalState(event, _answers(state, event))}
        case ev.PlanApproved() | ev.PlanRejected() | ev.PlanExpired():
            states = _known(states, event.proposal, decision=event)
        case ev.PlanApplied():
            states = _known(states, event.proposal, applied=event)
        case ev.PlanFailed():
            states = _known(states, event.proposal, failed=event)
        case ev.PlanScored():
            states = _known(states, event.proposal, scored=event)
        case ev.CommandRefused():
            name = event.command.rpartition(" ")[2]  # such as "approve p3"
            left = event.by == "auto" or (name in states and states[name].left)
            states = _known(states, name, refused=event, left=left)
        case ev.Note():
            states = _known(states, event.proposal, note=event)
    return states


def _answers(state: RunState, proposed: ev.PlanProposed) -> frozenset[int]:
    """The verdict that led to a proposal; one that the Scheduler chose is for all that is wrong with devices by then."""
    led = () if proposed.verdict is None else (proposed.verdict,)
    others = (one.verdict for one in state.open_verdicts if proposed.optional)
    return frozenset([*led, *(verdict.verdict for verdict in others if verdict.cause in ev.OF_DEVICES)])


def _known(states: dict[_K, _S], key: _K, **news: object) -> dict[_K, _S]:
    """`states` with news of one of them; news of what the log never opened is passed over."""
    return {**states, key: _changed(states[key], **news)} if key in states else states


def _with_back(state: RunState, ranks: Collection[int]) -> RunState:
    """Ranks take part; those that were lost are back."""
    back = state.lost.keys() & ranks
    lost = {rank: loss for rank, loss in state.lost.items() if rank not in back}
    return _changed(state, lost=lost, rejoined=state.rejoined | back)
