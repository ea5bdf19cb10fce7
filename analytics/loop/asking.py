"""When the Scheduler is asked for a better plan, and what it is told."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.site import AdaptationOptions, Site
from unskew.analytics.scheduler.propose import Proposal, propose
from unskew.analytics.scheduler.state import SchedulerState
from unskew.collector.events import Regrouped


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
