"""The plans of a run, as its control events tell: which were issued, which is in force, what a recovery starts from; and when
the Scheduler is asked for a better one, and what it is told."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.site import AdaptationOptions, Site
from unskew.analytics.scheduler.propose import Proposal, propose
from unskew.analytics.scheduler.state import SchedulerState
from unskew.collector.events import Control, PlanApplied, PlanFailed, PlanIssued, Regrouped


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


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """The Scheduler is asked at iteration `at`, after `verdict`; what the last change of plan cost is what the next is
    estimated to cost."""

    bytes_per_us: float
    regroup_us: float
    at: int | None = None
    verdict: int | None = None

    def changed(self, regrouped: Regrouped) -> Asking:
        """A plan came into force at this cost."""
        asking = self
        if regrouped.plan_version > 0:
            regroup_us = 1e6 * (regrouped.seconds - regrouped.migrate_seconds)
            asking = msgspec.structs.replace(asking, regroup_us=regroup_us)
        if regrouped.moved_bytes:
            bytes_per_us = regrouped.moved_bytes / (1e6 * regrouped.migrate_seconds)
            asking = msgspec.structs.replace(asking, bytes_per_us=bytes_per_us)
        return asking

    def due(self, iteration: int) -> bool:
        """Whether it is time to ask."""
        return self.at is not None and iteration >= self.at

    def anew(self, iteration: int) -> Asking:
        """As soon as `iteration` is judged, where anything was ever asked about; not later than was intended."""
        if self.verdict is None or self.at is not None:
            return self
        return msgspec.structs.replace(self, at=iteration)

    def ask(
        self, iteration: int, plan: Plan, monitor: Monitor, alive: frozenset[int], *, site: Site, options: AdaptationOptions
    ) -> tuple[Asking, Proposal | None, str]:
        """The Scheduler's answer when it is time to ask: a proposal with its reason, or why there is none."""
        if not self.due(iteration) or monitor.cost is None or not site.layer_bytes:
            return self, None, ""
        asked = msgspec.structs.replace(self, at=None)
        state = SchedulerState(
            origin=site.origin,
            alive=alive,
            speeds=monitor.speeds,
            cost=monitor.cost,
            batches=monitor.retraining.recent(options.recent),
            iterations=site.iterations,
            layer_bytes=site.layer_bytes,
            bytes_per_us=self.bytes_per_us,
            regroup_us=self.regroup_us,
            units=site.units,
            room=site.room,
            slow_since={
                verdict.culprits[0].rank: verdict.since_iteration
                for verdict in monitor.verdicts.values()
                if verdict.cause == "slow_device" and verdict.culprits[0].rank is not None
            },
        )
        try:
            proposal, reason = propose(iteration + 1, plan, state, options.scheduler)
        except PlanError as error:  # the plan in force works: no fault of ours in seeking a better one may end training
            return asked, None, f"no other plan could be made: {error}"
        if proposal is not None:
            evidence = {**proposal.evidence, "predictor": monitor.retraining.number}
            proposal = msgspec.structs.replace(proposal, evidence=evidence)
        return asked, proposal, reason
