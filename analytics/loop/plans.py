"""The plans of a run, as its control events tell: which were issued, which is in force, what a recovery starts from."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.collector.events import Control, PlanApplied, PlanFailed, PlanIssued


class IssuedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan sent to the ranks and not yet entered by all. `old`: what it replaces by choice, None when there is no choice."""

    plan: Plan
    proposal: str
    optional: bool
    old: Plan | None


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """`first` is what the run starts with, `applied` what all its living members acted on last, None before the first."""

    first: Plan
    by_plan_version: dict[int, Plan] = {}
    applied: Plan | None = None
    pending: IssuedPlan | None = None

    @property
    def latest(self) -> Plan:
        """What was issued last."""
        return self.by_plan_version[max(self.by_plan_version)] if self.by_plan_version else self.first

    @property
    def next_plan_version(self) -> int:
        return self.latest.plan_version + 1

    @property
    def in_force(self) -> Plan:
        """What every living member of it has acted on last."""
        return self.applied or self.first

    @property
    def involved(self) -> frozenset[int]:
        """Ranks with a role in the plan in force or in the one in progress; a living rank beside them is on standby."""
        return frozenset((*self.in_force.ranks, *(self.pending.plan.ranks if self.pending else ())))

    @property
    def base(self) -> Plan:
        """What a recovery starts from: the plan in force, or a recovery that was already in progress.

        A pending optional plan is given up: its layers may not have moved yet, the old holders still hold them.
        """
        return self.in_force if self.pending is None or self.pending.optional else self.pending.plan

    def take(self, event: Control) -> Plans:
        """With one more event of the run in the log."""
        if isinstance(event, PlanFailed):
            return msgspec.structs.replace(self, pending=None)
        if not isinstance(event, (PlanIssued, PlanApplied)):
            return self
        plan = Plan.from_data(event.plan)
        known = {**self.by_plan_version, plan.plan_version: plan}
        if isinstance(event, PlanApplied):
            return msgspec.structs.replace(self, by_plan_version=known, applied=plan, pending=None)
        old = self.latest if event.optional and event.proposal else None
        pending = IssuedPlan(plan=plan, proposal=event.proposal, optional=event.optional, old=old)
        return msgspec.structs.replace(self, by_plan_version=known, pending=pending)

    def give_up(self, reason: str) -> list[Control]:
        """What to log when a pending change of plan will not happen."""
        if self.pending is None or not self.pending.optional:
            return []
        return [PlanFailed(plan_version=self.pending.plan.plan_version, proposal=self.pending.proposal, reason=reason)]
