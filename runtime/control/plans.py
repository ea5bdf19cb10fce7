"""The plans of a run: which were issued, which is in force, and what a recovery has to start from."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.collector.events import PlanApplied
from unskew.runtime.protocol import PlanEntered


class IssuedPlan(msgspec.Struct, kw_only=True):
    """A plan sent to the ranks and not yet entered by all. `asked_ns`: when the loss was noticed, None for a
    change at a boundary."""

    plan: Plan
    proposal: str
    reason: str
    optional: bool
    asked_ns: int | None
    old: Plan | None
    entered: dict[int, PlanEntered]


class PlanInForce(msgspec.Struct, frozen=True, kw_only=True):
    """Every living member acts on the plan. `seconds` from the asking to the last of them; `old` = what it replaced by
    choice."""

    plan: Plan
    proposal: str
    old: Plan | None
    iteration: int
    seconds: float
    migrate_s: float
    moved_bytes: int
    event: PlanApplied


class Plans:
    """Starts with the run's first plan, issued as epoch 0."""

    def __init__(self, first: Plan, asked_ns: int) -> None:
        self.by_plan_version: dict[int, Plan] = {}
        self.latest = first
        self._in_force = first
        self.pending: IssuedPlan | None = None
        self.issue(first, proposal="", reason="the run's first plan", optional=False, asked_ns=asked_ns, old=None)

    @property
    def next_plan_version(self) -> int:
        return self.latest.plan_version + 1

    @property
    def in_force(self) -> Plan:
        """What every living member of it has acted on last."""
        return self._in_force

    @property
    def involved(self) -> frozenset[int]:
        """Ranks with a role in the plan in force or in the one under way; a living rank beside them is on standby."""
        return frozenset((*self._in_force.ranks, *(self.pending.plan.ranks if self.pending else ())))

    @property
    def base(self) -> Plan:
        """What a recovery starts from: the plan in force, or a recovery that was already under way.

        A pending optional plan is given up: its layers may not have moved yet, the old holders still hold them.
        """
        if self.pending is not None and not self.pending.optional:
            return self.pending.plan
        return self._in_force

    def issue(self, plan: Plan, *, proposal: str, reason: str, optional: bool, asked_ns: int | None, old: Plan | None) -> None:
        """Note a plan that is about to be sent."""
        self.by_plan_version[plan.plan_version] = plan
        self.latest = plan
        self.pending = IssuedPlan(
            plan=plan, proposal=proposal, reason=reason, optional=optional, asked_ns=asked_ns, old=old, entered={}
        )

    def entered(self, message: PlanEntered, alive: set[int], watermark: int) -> PlanInForce | None:
        """Note that a rank acts on a plan; the plan's particulars when it was the last one missing.

        `watermark`: iterations judged so far.
        """
        pending = self.pending
        if pending is None or message.plan_version != pending.plan.plan_version:
            return None
        pending.entered[message.rank] = message
        if not alive.intersection(pending.plan.ranks) <= pending.entered.keys():
            return None
        self.pending, self._in_force = None, pending.plan
        members = pending.entered.values()
        iteration = max(member.iteration for member in members)
        began_ns = pending.asked_ns or min(member.began_ns for member in members)
        return PlanInForce(
            plan=pending.plan,
            proposal=pending.proposal,
            old=pending.old,
            iteration=iteration,
            seconds=(max(member.at_ns for member in members) - began_ns) / 1e9,
            migrate_s=max(member.migrate_s for member in members),
            moved_bytes=sum(member.moved_bytes for member in members),
            event=PlanApplied(
                plan_version=pending.plan.plan_version,
                digest=pending.plan.digest,
                proposal=pending.proposal,
                iteration=iteration,
                reason=pending.reason,
                plan=pending.plan.to_data(),
                watermark=watermark,
            ),
        )
