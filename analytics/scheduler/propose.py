"""Faults + speeds -> proposals: how the layers and micro-batches should lie on the ranks that are left
(docs/internals/scheduler.md).

`propose` looks for a better plan at any time: after a slow-down, after a death, after a device has healed. Its steps:

1. named candidates (candidates.py): layers and micro-batches by speed, micro-batches only, one partition for all replicas
   (ResiHP section 6.2), without the slowest ranks, the joint planner's (planners/joint/joint.py); tensor-parallel groups are
   cut by their members' speeds, shrink to those who live, grow by those who have no place (crews.py);
2. local search from the best: one layer, one member or one micro-batch away from the replica that finishes last, as long as it
   helps;
3. each is scored by the one evaluator on the recent batches at the estimated speeds: mean predicted iteration time plus the
   cost of the change spread over the remaining iterations; among near ties the one that moves the fewest layers wins;
4. proposed only if the gain is large enough, certain over the batches, and repays the change within the expected life of the
   fault (cost_benefit.py).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from unskew.analytics.core.cost import CostModel, speed_of
from unskew.analytics.core.layout import Layout, to_plan, weighted
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.evaluator import Timeline, evaluate
from unskew.analytics.pipeline.prediction import durations_us, layer_costs, messages_of, model_for
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.planners.adaptis.searched import RankTimes, searched_anew, searched_layout
from unskew.analytics.planners.problem import PlannerJob
from unskew.analytics.scheduler.candidates import joint_layout, members_of, named_layouts, neighbours, staffed
from unskew.analytics.scheduler.changes import describe, moved_layers
from unskew.analytics.scheduler.cost_benefit import CostBenefit, FaultLife, interval, weigh
from unskew.analytics.scheduler.crews import Crews, shares_of
from unskew.collector.events import CHUNK_KINDS, PlanProposed


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is estimated when a plan is sought. `origin` is the run's first plan: it gives each rank its replica and its place.

    `batches[k][m]`: work of micro-batch m in the k-th recent iteration (10 to 30 of them). `iterations` = length of the run.
    `layer_bytes[l]`: parameters and optimiser state of layer l; `bytes_per_us`: at which rate moved layers travel, all
    together; `regroup_us`: standstill at the boundary. `slow_since[r]`: the iteration in which the slowness of rank r began.
    `units`: in how many a layer can be cut among the members of a tensor-parallel group; 0 = it cannot.
    """

    origin: Plan
    alive: frozenset[int]
    speeds: dict[int, dict[str, float]]
    cost: CostModel
    batches: tuple[tuple[Work, ...], ...]
    iterations: int
    layer_bytes: tuple[int, ...]
    bytes_per_us: float
    regroup_us: float
    slow_since: dict[int, int] = {}
    units: int = 0


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds. `margin`: how many times the expected gain must repay the cost; `life`: how long slow phases last; a rank
    slower than `leave_below` may be left out; the search ends after `search_actions` scheduled actions: a count, so that its
    result does not depend on the load."""

    min_gain_percent: float = 3.0
    margin: float = 1.5
    tie_percent: float = 0.5
    leave_below: float = 0.5
    search_actions: int = 100_000
    life: FaultLife = FaultLife()

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plan that was scored: layer counts and micro-batches per replica, predicted mean iteration, cost of getting there.

    `members`: the ranks of each replica in the order of its stages; `parts`, where some are tensor-parallel groups: per replica
    and stage what each member has of a layer, in any unit.
    """

    name: str
    members: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    predicted_us: float
    moved_layers: int
    cost_us: float
    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()


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
    bench = _Bench(plan, state, now_iteration)
    best = _search(bench, options)
    proposal = _weigh(bench, best, options)
    if proposal.plan.digest == plan.digest:
        return None, f"plan {plan.plan_version} is the best of {len(bench.scored)} candidates, the cost of a change included"
    if objection := _objection(proposal, bench.worth(proposal, options), options):
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


def _weigh(bench: _Bench, best: Candidate, options: SchedulerOptions) -> Proposal:
    """The best candidate against the current plan, on the same batches."""
    chosen = bench.plans[best]
    baseline = bench.iteration_us(bench.current)[0]
    gains = baseline - bench.iteration_us(chosen)[0]
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
    worth = bench.worth(proposal, options)
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


def _objection(proposal: Proposal, worth: CostBenefit, options: SchedulerOptions) -> str | None:
    """Why the change is not worth it; None when it is."""
    gain_us = proposal.baseline_us - proposal.predicted_us
    if proposal.gain_percent < options.min_gain_percent:
        return f"a gain of {proposal.gain_percent:.1f} % is less than {options.min_gain_percent:g} %"
    if proposal.gain_interval_us is not None and proposal.gain_interval_us[0] <= 0.0:
        return f"a gain of {proposal.gain_percent:.1f} % is not certain over the recent batches"
    if not worth.worth:
        return (
            f"{gain_us / 1e3:.1f} ms in each of {proposal.life_iterations or 0:.0f} iterations do not repay {options.margin:g} "
            f"times the cost of {worth.cost_s:.2f} s"
        )
    return None


class _Bench:
    """Scores plans on the recent batches and remembers what it scored."""

    def __init__(self, plan: Plan, state: SchedulerState, now: int) -> None:
        self.current, self.state, self.now, self.remaining = plan, state, now, state.iterations - now
        self.costs = layer_costs(state.batches, model_for(state.cost, plan.schedule))
        self.scored: dict[Layout, Candidate] = {}
        self.plans: dict[Candidate, Plan] = {}
        self.crews = Crews(self.costs, state.speeds, state.units)
        self.scheduled_actions = 0

    def iteration_us(self, plan: Plan) -> tuple[Array, Timeline]:
        """Predicted time of each recent iteration under `plan`."""
        schedule = build_schedule(plan)
        self.scheduled_actions += len(schedule.order)
        durations = durations_us(schedule, self.costs, self.state.speeds)
        timeline = evaluate(schedule, durations, messages_of(schedule, self.costs))
        return timeline.makespan_us + self.state.cost.end_us(plan), timeline

    def score(self, name: str, layout: Layout, plan: Plan | None = None) -> tuple[Candidate, int]:
        """The candidate, and the replica that finishes last under it; `plan`: its plan, where it has an order of its own."""
        plan = plan or to_plan(layout, self.current.n_layers, plan_version=self.current.plan_version + 1)
        plan = msgspec.structs.replace(plan, layer_weights=self.current.layer_weights)
        times, timeline = self.iteration_us(plan)
        moved = moved_layers(self.current, plan)
        regroup_us = self.state.regroup_us if plan.digest != self.current.digest else 0.0
        cost_us = regroup_us + sum(self.state.layer_bytes[layer] * part for layer, part in moved) / self.state.bytes_per_us
        candidate = Candidate(
            name=name,
            members=tuple(tuple(rank for group in pipeline.groups for rank in group) for pipeline in layout.pipelines),
            layers=tuple(pipeline.layers for pipeline in layout.pipelines),
            micro_batches=tuple(pipeline.micro_batches for pipeline in layout.pipelines),
            predicted_us=float(times.mean()),
            moved_layers=len(moved),
            cost_us=cost_us,
            parts=shares_of(layout),
        )
        self.scored[layout], self.plans[candidate] = candidate, plan
        last = max(timeline.finish_us, key=lambda rank: float(timeline.finish_us[rank].mean()))
        return candidate, plan.role_of[last].replica

    def worth(self, proposal: Proposal, options: SchedulerOptions) -> CostBenefit:
        """Gain against cost over the life of the fault: of several the one that began last, which is expected to end first."""
        baseline_s = proposal.baseline_us / 1e6
        estimated = {rank: min(kinds.values(), default=1.0) for rank, kinds in self.state.speeds.items()}
        slow = [rank for rank, speed in estimated.items() if speed < 1.0 and rank in self.state.alive]
        ages = [max(0, self.now - self.state.slow_since.get(rank, self.now)) * baseline_s for rank in slow]
        return weigh(
            gain_per_s=1.0 - proposal.predicted_us / proposal.baseline_us,
            cost_s=proposal.cost_us / 1e6,
            remaining_s=self.remaining * baseline_s,
            slow_for_s=min(ages, default=None),
            margin=options.margin,
            life=options.life,
        )

    def objective(self, candidate: Candidate) -> float:
        """Mean iteration time with the cost of the change spread over the rest of the run."""
        return candidate.predicted_us + candidate.cost_us / self.remaining

    def job(self) -> PlannerJob:
        """The mean micro-batch of the recent batches as the planners take it."""
        of_layers, of_head = self.costs.at((self.state.cost.device_class, 1))
        layer_us = {kind: float(us.mean()) for kind, us in of_layers.items()}
        head_us = sum(float(us.mean()) for us in of_head.values())
        return PlannerJob(
            n_layers=self.current.n_layers,
            micro_batches=len(self.current.routes),
            forward_us=layer_us["F"],
            backward_us=sum(us for kind, us in layer_us.items() if kind != "F"),
            head_layers=head_us / sum(layer_us.values()),
            message_us=self.state.cost.message_us,
        )

    def times_by_kind(self) -> dict[int, RankTimes]:
        """Mean F, B and W of a micro-batch on each living rank."""

        def each(costs: dict[str, Array], rank: int) -> tuple[float, ...]:
            return tuple(float(costs[kind].mean()) / speed_of(self.state.speeds, rank, kind) for kind in CHUNK_KINDS)

        places = {rank: self.costs.at(self.state.cost.place_of(rank)) for rank in self.state.alive}
        return {rank: (each(of_layers, rank), each(of_head, rank)) for rank, (of_layers, of_head) in places.items()}


def _score_searched(bench: _Bench, best: Candidate) -> None:
    """Of a run that began with a searched plan: that plan while its ranks live, and AdaPtis' search anew for the replicas and
    micro-batches of the best plan so far, at the estimated speeds (planners/adaptis/searched.py)."""
    origin, version = bench.state.origin, bench.current.plan_version + 1
    if bench.state.alive.issuperset(origin.ranks):
        bench.score("the searched plan of the start", searched_layout(origin), origin.renumbered(version))
    ranks = [tuple(dict.fromkeys(members)) for members in best.members]
    try:
        anew = searched_anew(
            version,
            [*zip(ranks, best.micro_batches, strict=True)],
            bench.times_by_kind(),
            message_us=bench.state.cost.message_us,
            n_layers=bench.current.n_layers,
            layer_weights=bench.current.layer_weights,
        )
    except PlanError:
        return
    bench.score("searched anew (AdaPtis)", searched_layout(anew), anew)


def _search(bench: _Bench, options: SchedulerOptions) -> Candidate:
    """The best candidate found; `bench.scored` then holds all of them."""
    members = tuple(
        tuple(bench.crews.fitting(group, bench.current.role_of) for group in groups)
        for groups in members_of(bench.state.origin, bench.state.alive, bench.current)
    )
    slowest = {rank: min(bench.state.speeds.get(rank, {}).values(), default=1.0) for rank in bench.state.alive}
    leavers = sorted((rank for rank in slowest if slowest[rank] < options.leave_below), key=lambda rank: (slowest[rank], rank))
    layouts: dict[Layout, tuple[Candidate, int]] = {}
    named = [*named_layouts(bench.current, bench.state.origin, members, bench.crews, leavers)]
    jointly = joint_layout(
        bench.current, staffed(members, bench.crews), bench.crews, bench.job(), may_leave=options.leave_below > 0
    )
    for name, layout in [*named, *((name, weighted(layout, bench.current.layer_weights)) for name, layout in jointly)]:
        if layout not in layouts:
            layouts[layout] = bench.score(name, layout)
    layout = min(layouts, key=lambda key: bench.objective(layouts[key][0]))
    best, last = layouts[layout]
    improved = True
    while improved:
        improved = False
        for name, neighbour in neighbours(layout, last, bench.crews):
            if neighbour in bench.scored or bench.scheduled_actions >= options.search_actions:
                continue
            candidate, finishes_last = bench.score(name, neighbour)
            if bench.objective(candidate) < bench.objective(best):
                layout, best, last, improved = neighbour, candidate, finishes_last, True
                break
    if bench.state.origin.orders:
        _score_searched(bench, best)
        best = min(bench.scored.values(), key=bench.objective)
    limit = bench.objective(best) * (1 + options.tie_percent / 100)
    near = [candidate for candidate in bench.scored.values() if bench.objective(candidate) <= limit]
    return min(near, key=lambda candidate: (candidate.moved_layers, bench.objective(candidate)))
