"""Proposals that wait for approval: what the mode allows, what people say, what expires.

The queue is what the run's control events add up to (`take`); its other methods return the events to be logged next.

Modes govern optional changes: observe only records a proposal, approve waits for somebody, auto approves within its limits. A
minimal recovery after a death is no optional change.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.changes import describe
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.command import Command, wrong_name
from unskew.collector.events import (
    CommandRefused,
    Control,
    Mode,
    ModeChanged,
    Note,
    PlanApproved,
    PlanExpired,
    PlanIssued,
    PlanProposed,
    PlanRejected,
    RunStarted,
)

_MODES: tuple[Mode, ...] = get_args(Mode)


class AutoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What mode auto may do by itself: so many optional changes `within` so many iterations, so far apart, with at least this
    gain."""

    most_changes: int = 20
    within: int = 200
    least_apart: int = 5
    least_gain_percent: float = 3.0


class ApprovalQueue(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal is open at a time, a newer one replaces it; `approved_by` None = nobody has approved it yet.

    `numbered` proposals were made; `changed_at`: in which iterations optional ones were applied, as far back as the limits
    look; the last change of any kind was in iteration `last_change`.
    `limit_logged`: why auto does not approve the open one is in the log.
    """

    iterations: int
    mode: Mode = "auto"
    limits: AutoLimits = AutoLimits()
    open: PlanProposed | None = None
    approved_by: str | None = None
    numbered: int = 0
    changed_at: tuple[int, ...] = ()
    last_change: int | None = None
    limit_logged: bool = False

    @property
    def approved(self) -> PlanProposed | None:
        """The proposal to be applied."""
        return self.open if self.approved_by is not None else None

    def take(self, event: Control) -> ApprovalQueue:
        """With one more event of the run in the log."""
        closed: dict[str, Any] = {"open": None, "approved_by": None}
        match event:
            case RunStarted() | ModeChanged():
                changed: dict[str, Any] = {"mode": event.mode}
            case PlanProposed(optional=False):
                changed = {"numbered": self.numbered + 1, "last_change": event.at_iteration}
            case PlanProposed():
                changed = {"numbered": self.numbered + 1, "open": event, "approved_by": None, "limit_logged": False}
            case CommandRefused(by="auto") | Note(by="auto"):
                changed = {"limit_logged": True}
            case PlanApproved() if self._is_open(event.proposal):
                changed = {"approved_by": event.by}
            case PlanRejected() | PlanExpired() if self._is_open(event.proposal):
                changed = closed
            case PlanIssued() if self._is_open(event.proposal):
                at = event.watermark or 0
                changed = {**closed, "changed_at": (*self._recent(at), at), "last_change": at}
            case _:
                return self
        return msgspec.structs.replace(self, **changed)

    def propose(self, found: Proposal, verdict: int | None, reason: str, iteration: int, old: Plan) -> list[Control]:
        """Make an optional proposal, unless an approved one is about to be applied."""
        if self.approved is not None:
            return []
        made = found.event(self._next_name, verdict=verdict, reason=reason, at_iteration=iteration, old=old)
        return [*self.expire("a newer proposal came"), made]

    def recovery(
        self, plan: Plan, old: Plan, reason: str, *, verdict: int | None, iteration: int, expected_us: float | None
    ) -> tuple[PlanProposed, PlanApproved]:
        """The minimal recovery after a loss, proposed and approved in one breath."""
        return (
            PlanProposed(
                proposal=self._next_name,
                plan_version=plan.plan_version,
                digest=plan.digest,
                optional=False,
                reason=reason,
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
            PlanApproved(
                proposal=self._next_name, by="controller", reason=f"minimal recovery applies at once in mode {self.mode}"
            ),
        )

    def settle(self, iteration: int, *, lack: str = "") -> list[Control]:
        """What becomes of the open proposal by itself: it expires when it no longer pays, or ranks `lack` the memory for it;
        auto approves it."""
        if self.open is None:
            return []
        if lack and (self.approved is not None or self.mode == "auto"):
            return self.expire(f"plan {self.open.plan_version} does not fit: {lack}")
        if self.approved is not None:
            return self.expire("mode observe applies no change") if self.mode == "observe" else []
        gain_us = (self.open.baseline_us or 0) - (self.open.predicted_us or 0)
        if not self.open.policy and gain_us * (self.iterations - iteration) < self.open.cost_us:
            return self.expire(f"at iteration {iteration} too few iterations are left to repay the change")
        if self.mode != "auto":
            return []
        decided = self._by_auto(self.open, iteration)
        return [] if self.limit_logged and not isinstance(decided, PlanApproved) else [decided]

    def expire(self, reason: str) -> list[Control]:
        """Nothing is to be open any more."""
        return [] if self.open is None else [PlanExpired(proposal=self.open.proposal, reason=reason)]

    def command(self, command: Command, *, lack: str = "") -> Control:
        """What somebody asks: approve, reject, another mode, a note. A command that cannot be carried out is refused in the
        log, as is to approve a plan for which ranks `lack` the memory."""
        asked, by, user = f"{command.kind} {command.target}".strip(), command.by, command.user
        if wrong := wrong_name(by):
            return CommandRefused(command=asked, by=user, reason=wrong, user=user)
        if command.kind == "note":
            return Note(text=command.reason, by=by, user=user)
        refusal = self._refusal(command)
        if not refusal and lack and command.kind == "approve":
            refusal = f"proposal {command.target} does not fit: {lack}"
        if refusal:
            return CommandRefused(command=asked, by=by, reason=refusal, user=user)
        if command.kind == "mode":
            mode: Mode = next(mode for mode in _MODES if mode == command.target)
            return ModeChanged(mode=mode, by=by, reason=command.reason, user=user)
        answer = PlanApproved if command.kind == "approve" else PlanRejected
        return answer(proposal=command.target, by=by, reason=command.reason, user=user)

    def _refusal(self, command: Command) -> str:
        """Why a command cannot be carried out; "" when it can."""
        if command.kind == "mode":
            known = f"mode {command.target} is not known, allowed: {', '.join(_MODES)}"
            return "" if command.target in _MODES else known
        if command.target not in {f"p{number}" for number in range(1, self.numbered + 1)}:
            return f"there is no proposal {command.target}: so far {self.numbered or 'none'} were made"
        if not self._is_open(command.target) or self.approved is not None:
            return f"proposal {command.target} is not open"
        return "mode observe applies no change; switch to approve first" if self.mode == "observe" else ""

    def _by_auto(self, proposed: PlanProposed, iteration: int) -> Control:
        """What mode auto says to a proposal: a limit that lasts leaves it to people, one that passes delays it."""
        name, gain_percent, limits = proposed.proposal, proposed.gain_percent or 0.0, self.limits
        if not proposed.policy and gain_percent < limits.least_gain_percent:
            reason = f"mode auto applies gains from {limits.least_gain_percent:g} % on, this is {gain_percent:.1f} %"
            return CommandRefused(command=f"approve {name}", by="auto", reason=reason)
        if len(recent := self._recent(iteration)) >= limits.most_changes:
            until = recent[-limits.most_changes] + limits.within
            rate = f"{limits.most_changes} changes in {limits.within} iterations at most"
            if until >= self.iterations:
                return CommandRefused(command=f"approve {name}", by="auto", reason=f"mode auto makes {rate}, which are made")
            return Note(text=f"{name} waits until iteration {until}: mode auto makes {rate}", by="auto", proposal=name)
        if self.last_change is not None and iteration - self.last_change < limits.least_apart:
            until = self.last_change + limits.least_apart
            text = f"{name} waits until iteration {until}: mode auto keeps changes {limits.least_apart} iterations apart"
            return Note(text=text, by="auto", proposal=name)
        why = f"policy {proposed.policy} decides by its rule" if proposed.policy else f"gain of {gain_percent:.1f} %"
        return PlanApproved(proposal=name, by="auto", reason=f"{why} is within the limits of auto")

    def _recent(self, iteration: int) -> tuple[int, ...]:
        return tuple(at for at in self.changed_at if iteration - at < self.limits.within)

    def _is_open(self, proposal: str) -> bool:
        return self.open is not None and self.open.proposal == proposal

    @property
    def _next_name(self) -> str:
        return f"p{self.numbered + 1}"
