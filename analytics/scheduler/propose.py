"""Faults + speeds -> proposals: how the layers and micro-batches should lie on the ranks that are left
(docs/internals/scheduler.md).

`propose` looks for a better plan at any time: after a slow-down, after a death, after a device has healed. Its steps:

1. named candidates (candidates.py): layers and micro-batches by speed, micro-batches only, one partition for all replicas
   (ResiHP section 6.2), without the slowest ranks, the joint planner's (planners/joint/joint.py), all that is left laid out
   anew; tensor-parallel groups are cut by their members' speeds, shrink to those who live, grow by those who have no place
   (crews.py);
2. local search from the best: one layer, one member or one micro-batch away from the replica that finishes last, as long as it
   helps;
3. each is scored by the one evaluator on the recent batches at the estimated speeds: mean predicted iteration time plus the
   cost of the change spread over the remaining iterations; among near ties the one that moves the fewest layers wins;
4. proposed only if the gain is large enough, certain over the batches, and repays the change within the expected life of the
   fault (cost_benefit.py).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.changes import describe
from unskew.analytics.scheduler.cost_benefit import CostBenefit, interval, weigh
from unskew.analytics.scheduler.search import Candidate, PlanBench, best_of
from unskew.analytics.scheduler.state import SchedulerOptions, SchedulerState
from unskew.collector.events import PlanProposed


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A better plan with the numbers that speak for it; all times are per iteration, the mean over `SchedulerState.batches`.

    `gain_interval_us`: 95 % interval of the mean gain over the batches (cost_benefit.py); None with fewer than two batches.
    `life_iterations`: for how long the gain is expected to last; `risk`: probability that the fault ends before the change is
    repaid; None where nothing is gained.
    `policy`: the published policy whose rule it is, which no gain decides; "" = the Scheduler's.
    `evidence`: as plain data what else the choice was founded on: estimated speeds, the interval, the hash of the options.
    """

    plan: Plan
    change: str
    predicted_us: float
    baseline_us: float
    gain_percent: float
    gain_interval_us: tuple[float, float] | None
    cost_us: float
    payback_iterations: int | None
    moved_layers: int
    considered: tuple[Candidate, ...]
    evidence: dict[str, Any] = {}
    life_iterations: float | None = None
    risk: float | None = None
    policy: str = ""

    def event(self, name: str, *, verdict: int | None, reason: str, at_iteration: int, old: Plan) -> PlanProposed:
        """The proposal for the log: under `name`, after `verdict`, to replace the plan `old`."""
        return PlanProposed(
            proposal=name,
            plan_version=old.plan_version + 1,
            digest=self.plan.digest,
            optional=True,
            reason=reason,
            verdict=verdict,
            plan=self.plan.to_data(),
            predicted_us=round(self.predicted_us),
            baseline_us=round(self.baseline_us),
            gain_percent=self.gain_percent,
            cost_us=round(self.cost_us),
            payback_iterations=self.payback_iterations,
            at_iteration=at_iteration,
            considered=tuple(msgspec.to_builtins(candidate) for candidate in self.considered),
            change=self.change,
            evidence=self.evidence,
            policy=self.policy,
        )


_DEFAULTS = SchedulerOptions()


def propose(
    now_iteration: int, plan: Plan, state: SchedulerState, options: SchedulerOptions = _DEFAULTS
) -> tuple[Proposal | None, str]:
    """A plan worth changing to from iteration `now_iteration` on, or None; always with the reason."""
    remaining = state.iterations - now_iteration
    if gone := sorted(set(plan.ranks) - state.alive):
        return None, f"the plan still counts on rank {gone[0]}, which is not alive: recover first"
    if remaining < 1 or not state.batches:
        return None, "the run is at its end" if remaining < 1 else "no iteration has been committed yet to predict on"
    bench = PlanBench(plan, state, now_iteration, options.levels)
    best = best_of(bench, options)
    proposal = _weigh(bench, best, options)
    if proposal.plan.digest == plan.digest:
        return None, f"plan {plan.plan_version} is the best of {len(bench.scored)} candidates, the cost of a change included"
    goes_back = bench.sound and proposal.plan.digest == state.origin.digest
    least_gain = 0.0 if goes_back else options.min_gain_percent
    objection = _objection(proposal, _worth(bench, proposal, options), options, least_gain)
    if objection and "worth test" not in options.without:
        return None, f"{objection} (best of {len(bench.scored)} candidates: {proposal.change})"
    return proposal, (
        f"{proposal.predicted_us / 1e3:.0f} ms instead of {proposal.baseline_us / 1e3:.0f} ms per iteration predicted "
        f"({proposal.gain_percent:.1f} % less), repaid after {proposal.payback_iterations} of {remaining} iterations"
        + (
            f", risk that the fault ends before: {100 * proposal.risk:.0f} %"
            if proposal.risk and proposal.risk >= 0.005
            else ""
        )
    )


def _weigh(bench: PlanBench, best: Candidate, options: SchedulerOptions) -> Proposal:
    """The best candidate against the current plan, on the same batches."""
    chosen = bench.plans[best]
    baseline = bench.pricing.of(bench.current).iteration_us
    gains = baseline - bench.pricing.of(chosen).iteration_us
    gain = float(gains.mean())
    gain_interval_us = interval(gains.tolist()) if gains.size > 1 else None
    proposal = Proposal(
        plan=chosen,
        change=describe(bench.current, chosen),
        predicted_us=best.predicted_us,
        baseline_us=float(baseline.mean()),
        gain_percent=100.0 * gain / float(baseline.mean()),
        gain_interval_us=gain_interval_us,
        cost_us=best.cost_us,
        payback_iterations=math.ceil(best.cost_us / gain) if gain > 0 else None,
        moved_layers=best.moved_layers,
        considered=tuple(bench.scored.values()),
    )
    worth = _worth(bench, proposal, options)
    life_iterations = worth.life_s * 1e6 / proposal.baseline_us if gain > 0 else None
    risk = worth.risk if gain > 0 else None
    return msgspec.structs.replace(
        proposal,
        life_iterations=life_iterations,
        risk=risk,
        evidence={
            "speeds": {str(rank): kinds for rank, kinds in bench.state.speeds.items()},
            "gain_interval_us": gain_interval_us,
            "life_iterations": life_iterations,
            "risk": risk,
            "options": options.digest,
        },
    )


def _objection(proposal: Proposal, worth: CostBenefit, options: SchedulerOptions, least_gain: float) -> str | None:
    """Why the change is not worth it; None when it is."""
    gain_us = proposal.baseline_us - proposal.predicted_us
    if proposal.gain_percent < least_gain:
        return f"a gain of {proposal.gain_percent:.1f} % is less than {least_gain:g} %"
    if proposal.gain_interval_us is not None and proposal.gain_interval_us[0] <= 0.0:
        return f"a gain of {proposal.gain_percent:.1f} % is not certain over the recent batches"
    if not worth.worth:
        return (
            f"{gain_us / 1e3:.1f} ms in each of {proposal.life_iterations or 0:.0f} iterations do not repay {options.margin:g} "
            f"times the cost of {worth.cost_s:.2f} s"
        )
    return None


def _worth(bench: PlanBench, proposal: Proposal, options: SchedulerOptions) -> CostBenefit:
    """Gain against cost over the life of the fault: of several the one that began last, which is expected to end first."""
    baseline_s = proposal.baseline_us / 1e6
    estimated = {rank: min(kinds.values(), default=1.0) for rank, kinds in bench.state.speeds.items()}
    slow = [rank for rank, speed in estimated.items() if speed < 1.0 and rank in bench.state.alive]
    ages = [max(0, bench.now - bench.state.slow_since.get(rank, bench.now)) * baseline_s for rank in slow]
    return weigh(
        gain_per_s=1.0 - proposal.predicted_us / proposal.baseline_us,
        cost_s=proposal.cost_us / 1e6,
        remaining_s=bench.remaining * baseline_s,
        slow_for_s=min(ages, default=None),
        margin=options.margin,
        life=options.life,
    )
