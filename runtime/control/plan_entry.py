"""Ranks entering a plan that was sent to them: when the last one has, what it took."""

from __future__ import annotations

import msgspec

from unskew.analytics.loop.controller_rules import Issue
from unskew.collector.events import PlanApplied, Regrouped
from unskew.runtime.protocol import PlanEntered


class PlanEntry(msgspec.Struct, kw_only=True):
    """A plan on its way. `asked_ns`: when the loss was noticed, None for a change at a boundary."""

    issued: Issue
    asked_ns: int | None
    entered: dict[int, PlanEntered] = {}

    def take(self, message: PlanEntered, alive: frozenset[int], watermark: int) -> tuple[PlanApplied, Regrouped] | None:
        """Note that a rank acts on a plan; what to log of this one when it was the last one missing.

        `watermark`: iterations judged so far.
        """
        plan = self.issued.plan
        if message.plan_version != plan.plan_version:
            return None
        self.entered[message.rank] = message
        if not alive.intersection(plan.ranks) <= self.entered.keys():
            return None
        members = self.entered.values()
        iteration = max(member.iteration for member in members)
        began_ns = self.asked_ns or min(member.began_ns for member in members)
        return PlanApplied(
            plan_version=plan.plan_version,
            digest=plan.digest,
            proposal=self.issued.proposal,
            iteration=iteration,
            reason=self.issued.reason,
            plan=plan.to_data(),
            watermark=watermark,
        ), Regrouped(
            plan_version=plan.plan_version,
            iteration=iteration,
            seconds=(max(member.at_ns for member in members) - began_ns) / 1e9,
            migrate_seconds=max(member.migrate_s for member in members),
            moved_bytes=sum(member.moved_bytes for member in members),
        )
