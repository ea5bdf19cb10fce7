"""A run that follows a published policy: the policy's answer to what happened, as a plan that ranks execute.

The policies (analytics/policies/) are the very objects that the simulator plays; view.py tells them of the run what the
simulator tells them of its cluster. Of an answer the layout is carried out. How it comes into force is the runtime's way:
layers move between living ranks while each has a holder, whatever pause or restart the paper pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from unskew.analytics.cluster.event import ClusterEvent, Kind
from unskew.analytics.core.layout import Layout, to_plan, weighted
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.loop.by_policy.view import RunFacts, devices_of, view_of
from unskew.analytics.loop.site import Site
from unskew.analytics.policies.base import WAITING, Policy, Reaction
from unskew.analytics.scheduler.changes import describe, moved_layers
from unskew.analytics.scheduler.propose import Proposal
from unskew.analytics.scheduler.recovery import recover
from unskew.analytics.scheduler.replicas import with_replicas


class PolicyStopError(PlanError):
    """The policy ends the run; the message is its reason."""


class NextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`plan` None: what runs stays. `again_in`: iterations until the policy wants to be asked once more."""

    plan: Plan | None
    reason: str
    again_in: int | None = None


class PolicyFollower(msgspec.Struct, frozen=True, kw_only=True):
    """The policy `name` decides. `layouts`: digest of each plan that it has decided on -> its layout; `speeds`: [device] at the
    last decision, () before the first."""

    name: str
    layouts: dict[str, Layout] = {}
    speeds: tuple[float, ...] = ()

    def lost(self, ranks: Collection[int], known: RunFacts, number: int) -> tuple[PolicyFollower, Plan, str]:
        """The plan numbered `number` after the loss of `ranks`, who are not among the living any more, and the policy's reason;
        who leaves at a death hands nothing over, so where it takes ranks that leave the work is rerouted first.
        Raises `PolicyStopError`; `PlanError` where layers have lost their last holder or the policy waits: a checkpoint can
        help then."""
        after, answer = self._asked("failed", ranks, known, self._speeds(known))
        decided = answer.plan or known.plan  # what runs stays, also where they have no part in it
        if not set(ranks).isdisjoint(decided.ranks):
            who = f"{self.name} has no plan without rank {min(ranks)}"
            raise PlanError(f"{who} ({answer.reason}): a checkpoint is needed to go on")
        if known.site.by_replica:
            return after, decided.renumbered(number), answer.reason
        rerouted = recover(known.plan, set(ranks), number)  # raises where a layer has no holder
        try:
            recover(known.plan, set(known.plan.ranks).difference(decided.ranks), number)
        except PlanError:  # who leaves at a death hands nothing over
            before = self.layouts.get(known.plan.digest)
            layouts = self.layouts if before is None else {**self.layouts, rerouted.digest: before}
            held = msgspec.structs.replace(self, layouts=layouts)
            first = "its work is rerouted first, for ranks that would leave are the only ones that hold some layers"
            return held, known.site.fitted(rerouted, known.plan), f"{answer.reason}; {first}"
        return after, decided.renumbered(number), answer.reason

    def asked(self, known: RunFacts) -> tuple[PolicyFollower, NextPlan]:
        """The answer to what is new since the last decision: a device that is back, slow, or healthy again; else a review."""
        speeds = self._speeds(known)
        changes: dict[Kind, list[int]] = {"joined": [], "slowed": [], "recovered": []}
        for device, (was, speed) in enumerate(zip(self.speeds or (1.0,) * len(speeds), speeds, strict=True)):
            if speed > was:
                changes["recovered" if was else "joined"].append(device)
            elif 0 < speed < was:
                changes["slowed"].append(device)
        kind: Kind = next((kind for kind, devices in changes.items() if devices), "review")
        try:
            return self._asked(kind, changes.get(kind, ()), known, speeds)
        except PlanError as error:
            return self, NextPlan(plan=None, reason=f"no other plan could be made: {error}")

    def _speeds(self, known: RunFacts) -> tuple[float, ...]:
        """[device], as the policy knows them: to one that sees no slow devices who lives is healthy."""
        speeds = devices_of(known)
        return speeds if "slowed" in self._policy.sees else tuple(float(speed > 0) for speed in speeds)

    @property
    def _policy(self) -> Policy:
        from unskew.analytics.policies.registry import policy  # noqa: PLC0415 - optimisers, which a diagnosis does without

        return policy(self.name)

    def _asked(
        self, kind: Kind, devices: Collection[int], known: RunFacts, speeds: tuple[float, ...]
    ) -> tuple[PolicyFollower, NextPlan]:
        view = view_of(known, self.layouts.get(known.plan.digest), speeds)
        event = ClusterEvent(kind=kind, at_s=view.now_s, devices=tuple(sorted(devices)))
        reaction = self._policy.react(view, event)
        if reaction.layout is None:
            raise PolicyStopError(f"{self.name} stops: {reaction.reason}")
        if reaction.layout == WAITING:
            raise PlanError(f"{self.name} {reaction.reason}: a checkpoint is needed to go on")
        decided = _plan(reaction.layout, known.site, known.plan)
        after = msgspec.structs.replace(self, speeds=speeds, layouts={**self.layouts, decided.digest: reaction.layout})
        return after, NextPlan(
            plan=None if decided.digest == known.plan.digest else decided,
            reason=f"{self.name}: {reaction.reason}" if reaction.reason else f"{self.name} keeps the plan",
            again_in=_again_in(reaction, view.now_s, view.seconds(view.layout)),
        )

    def proposal(self, answer: NextPlan, known: RunFacts, recent: int) -> Proposal | None:
        """The answer as a proposal; what it gains is told to people, the policy does not go by it."""
        if answer.plan is None:
            return None
        plan, monitor, site = known.plan, known.monitor, known.site
        decided = answer.plan.renumbered(plan.plan_version + 1)
        baseline_us, predicted_us = (monitor.expected_us(one, recent) or 0.0 for one in (plan, decided))
        moved = moved_layers(plan, decided)
        moving_us = sum(site.layer_bytes[layer] * part for layer, part in moved) / site.bytes_per_us if moved else 0.0
        return Proposal(
            plan=decided,
            change=describe(plan, decided),
            predicted_us=predicted_us,
            baseline_us=baseline_us,
            gain_percent=100.0 * (1.0 - predicted_us / baseline_us) if baseline_us else 0.0,
            gain_interval_us=None,
            cost_us=site.regroup_us + moving_us,
            payback_iterations=None,
            moved_layers=len(moved),
            considered=(),
            evidence={
                "speeds": {str(rank): kinds for rank, kinds in monitor.speeds.items()},
                "predictor": monitor.retraining.number,
            },
            policy=self.name,
        )


def _plan(layout: Layout, site: Site, before: Plan) -> Plan:
    """What ranks execute of a layout, in place of the plan `before`. Raises `PlanError`."""
    origin = site.origin
    if site.by_replica:
        return with_replicas(origin, {one.replica for one in layout.pipelines}, 0)
    plan = to_plan(weighted(layout, origin.layer_weights), origin.n_layers)
    return site.fitted(msgspec.structs.replace(plan, layer_weights=origin.layer_weights), before)


def _again_in(reaction: Reaction, now_s: float, iteration_s: float) -> int | None:
    reviews = [one.at_s - now_s for one in reaction.later if one.kind == "review"]
    return max(1, math.ceil(min(reviews) / iteration_s)) if reviews else None
