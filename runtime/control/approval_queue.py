"""The desk where proposals lie: what the mode allows, what people say, what expires. Pure: every call returns the events it
makes.

Modes govern optional changes: observe only records a proposal, approve waits for somebody, auto approves within its limits. A
minimal recovery after a death is no optional change.
"""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.scheduler.changes import describe
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.events import (
    CommandRefused,
    Control,
    Mode,
    ModeChanged,
    Note,
    PlanApproved,
    PlanExpired,
    PlanProposed,
    PlanRejected,
)
from unskew.collector.write.commands import Command

_MODES: tuple[Mode, ...] = ("observe", "approve", "auto")


class AutoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What mode auto may do by itself: so many optional changes a run, so many iterations apart, with at least this gain."""

    most_changes: int = 20
    least_apart: int = 5
    least_gain_percent: float = 3.0


class OpenProposal(msgspec.Struct, kw_only=True):
    """The proposal on the desk; `approved_by` None = still open."""

    proposal: str
    plan: Plan
    gain_us: float
    gain_percent: float
    cost_us: float
    approved_by: str | None = None


class ApprovalQueue:
    """One proposal lies on it at a time; a newer one replaces it."""

    def __init__(self, mode: Mode, iterations: int, limits: AutoLimits | None = None) -> None:
        self.mode: Mode = mode
        self._iterations, self._limits = iterations, limits or AutoLimits()
        self._open_proposal: OpenProposal | None = None
        self._numbered = 0
        self._changes = 0
        self._last_change: int | None = None

    def propose(self, found: Proposal, verdict: int | None, reason: str, iteration: int, old: Plan) -> list[Control]:
        """Lay down a proposal; in mode auto it may be approved at once."""
        if self._open_proposal is not None and self._open_proposal.approved_by is not None:
            return []
        events = self.expire("a newer proposal came")
        name = self._name()
        self._open_proposal = OpenProposal(
            proposal=name,
            plan=found.plan,
            gain_us=found.baseline_us - found.predicted_us,
            gain_percent=found.gain_percent,
            cost_us=found.cost_us,
        )
        events.append(found.event(name, verdict=verdict, reason=reason, at_iteration=iteration, old=old))
        return events

    def recovery(
        self, plan: Plan, old: Plan, suspect: Suspect, *, verdict: int | None, iteration: int, expected_us: float | None
    ) -> list[Control]:
        """The minimal recovery after a loss, proposed and approved in one breath."""
        name = self._name()
        self._last_change = iteration
        return [
            PlanProposed(
                proposal=name,
                plan_version=plan.plan_version,
                digest=plan.digest,
                optional=False,
                reason=f"rank {suspect.rank} was lost: its work is rerouted to ranks that hold its layers",
                verdict=verdict,
                plan=plan.to_data(),
                predicted_us=None if expected_us is None else round(expected_us),
                baseline_us=None,
                gain_percent=None,
                cost_us=0,
                payback_iterations=None,
                at_iteration=iteration,
                change=describe(old, plan),
            ),
            PlanApproved(proposal=name, by="controller", reason=f"minimal recovery applies at once in mode {self.mode}"),
        ]

    def take_approved(self, iteration: int) -> tuple[OpenProposal | None, list[Control]]:
        """The proposal to apply now, if it is approved (or auto approves it now); an open one that no longer pays expires."""
        open_proposal = self._open_proposal
        if open_proposal is None:
            return None, []
        if self.mode == "observe" and open_proposal.approved_by is not None:
            return None, self.expire("mode observe applies no change")
        events: list[Control] = []
        if open_proposal.approved_by is None:
            if open_proposal.gain_us * (self._iterations - iteration) < open_proposal.cost_us:
                return None, self.expire(f"at iteration {iteration} too few iterations are left to repay the change")
            if self.mode != "auto" or self._auto_refuses(open_proposal, iteration):
                return None, []
            open_proposal.approved_by = "auto"
            events.append(
                PlanApproved(
                    proposal=open_proposal.proposal,
                    by="auto",
                    reason=f"gain of {open_proposal.gain_percent:.1f} % is within the limits of auto",
                )
            )
        self._open_proposal = None
        self._changes += 1
        self._last_change = iteration
        return open_proposal, events

    def expire(self, reason: str) -> list[Control]:
        """Clear the desk."""
        open_proposal, self._open_proposal = self._open_proposal, None
        return [] if open_proposal is None else [PlanExpired(proposal=open_proposal.proposal, reason=reason)]

    def command(self, command: Command) -> list[Control]:
        """What somebody asks: approve, reject, another mode, a note. A command that cannot be carried out is refused in the
        log."""
        if command.kind == "note":
            return [Note(text=command.reason, by=command.by)]
        if command.kind == "mode":
            return self._change_mode(command)
        open_proposal = self._open_proposal
        if open_proposal is None or open_proposal.proposal != command.target or open_proposal.approved_by is not None:
            return [self._refused(command, f"proposal {command.target} is not open")]
        if self.mode == "observe":
            return [self._refused(command, "mode observe applies no change; switch to approve first")]
        if command.kind == "reject":
            self._open_proposal = None
            return [PlanRejected(proposal=open_proposal.proposal, by=command.by, reason=command.reason)]
        open_proposal.approved_by = command.by
        return [PlanApproved(proposal=open_proposal.proposal, by=command.by, reason=command.reason)]

    def _change_mode(self, command: Command) -> list[Control]:
        for mode in _MODES:
            if mode == command.target:
                self.mode = mode
                return [ModeChanged(mode=mode, by=command.by, reason=command.reason)]
        return [self._refused(command, f"mode {command.target} is not known, allowed: {', '.join(_MODES)}")]

    def _auto_refuses(self, open_proposal: OpenProposal, iteration: int) -> bool:
        limits = self._limits
        return (
            self._changes >= limits.most_changes
            or open_proposal.gain_percent < limits.least_gain_percent
            or (self._last_change is not None and iteration - self._last_change < limits.least_apart)
        )

    @property
    def newest(self) -> str:
        """The name of the last proposal made."""
        return f"p{self._numbered}"

    def _name(self) -> str:
        self._numbered += 1
        return self.newest

    @staticmethod
    def _refused(command: Command, reason: str) -> CommandRefused:
        return CommandRefused(command=f"{command.kind} {command.target}".strip(), by=command.by, reason=reason)
