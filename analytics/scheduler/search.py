"""The search for a plan: named candidates, then one step after another from the best, each scored on the recent batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf

import msgspec
import numpy as np

from unskew.analytics.core.cost import speed_of
from unskew.analytics.core.layout import Group, Layout, Pipeline, to_plan, weighted
from unskew.analytics.core.plan import Plan, PlanError, split_evenly, splits_backward
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.prediction import layer_costs, model_for
from unskew.analytics.planners.adaptis.lending import MORE_KEPT, lent
from unskew.analytics.planners.adaptis.paths import OrderedPaths, PathsTask, most_kept, paths_of
from unskew.analytics.planners.adaptis.searched import RankTimes, holding_layout, searched_anew, searched_layout
from unskew.analytics.planners.costing import pipeline_bound_us
from unskew.analytics.planners.problem import Level, PlannerJob
from unskew.analytics.scheduler.candidates import (
    AS_BEFORE,
    anew_layout,
    joined_layouts,
    joint_layout,
    levels_layouts,
    members_of,
    named_layouts,
    neighbours,
    staffed,
    two_hold_each_layer,
)
from unskew.analytics.scheduler.changes import alike, moved_layers
from unskew.analytics.scheduler.cost_benefit import Pricing
from unskew.analytics.scheduler.crews import Crew, Crews, shares_of
from unskew.analytics.scheduler.state import SchedulerOptions, SchedulerState
from unskew.collector.events import CHUNK_KINDS, ChunkKind

UNSEEN = 1.1
"""A plan with a group twice as large as any that has been measured must be better by this factor: what its members exchange
beside their sums is not known."""
LENT_ACTIONS = 300_000
"""Scheduled by the search for layers to lend: some 0.9 s of a core."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plan that was scored: layer counts and micro-batches per replica, predicted mean iteration, cost of getting there.

    `members`: the ranks of each replica in the order of its stages; `parts`, where some are tensor-parallel groups: per replica
    and stage what each member has of a layer, in any unit; `recompute`, `sequence_parallel`: the ranks that are so.
    """

    name: str
    members: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    predicted_us: float
    moved_layers: int
    cost_us: float
    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    recompute: tuple[int, ...] = ()
    sequence_parallel: tuple[int, ...] = ()


class PlanBench:
    """Scores plans on the recent batches and remembers what it scored."""

    def __init__(self, plan: Plan, state: SchedulerState, now: int, levels: tuple[Level, ...]) -> None:
        self.current, self.state, self.now, self.remaining = plan, state, now, state.iterations - now
        self.costs = layer_costs(state.batches, model_for(state.cost, plan.schedule))
        self.scored: dict[Layout, Candidate] = {}
        self.plans: dict[Candidate, Plan] = {}
        self._least_us: dict[Pipeline, float] = {}
        self._fitted: dict[Layout, Plan | None] = {}
        self._first_layers = {tuple(hop.n_layers for hop in route.hops) for route in state.origin.routes}
        self.room = state.room
        if self.room is not None and self.room.holds_everything(len(plan.routes)):
            self.room = None
        self.crews = Crews(self.costs, state.speeds, state.units, self.room, even="tp" not in levels)
        self.levels = levels
        self._measured = max([state.cost.tp, plan.widest, *(place.tp for place in state.cost.others)])
        self.pricing = Pricing(self.costs, state.speeds)

    def fitted(self, name: str, layout: Layout, plan: Plan | None = None) -> Plan | None:
        """The plan of a layout, as its ranks can hold it, None where they cannot; `plan`: the one with an order of its own."""
        if layout not in self._fitted or plan is not None:
            paced = layout if name in AS_BEFORE or layout.moves else self.crews.paced(layout)
            plan = plan or to_plan(paced, self.current.n_layers, plan_version=self.current.plan_version + 1)
            plan = msgspec.structs.replace(plan, layer_weights=self.current.layer_weights)
            self._fitted[layout] = None
            with suppress(PlanError):
                self._fitted[layout] = plan if self.room is None else self.room.fitted(plan, self.current)
        return self._fitted[layout]

    def score(self, name: str, layout: Layout) -> tuple[Candidate, int]:
        """The candidate of a layout that fits, and the replica that finishes last under it."""
        plan = self.fitted(name, layout)
        assert plan is not None
        price = self.pricing.of(plan)
        moved = moved_layers(self.current, plan)
        candidate = Candidate(
            name=name,
            members=tuple(tuple(rank for group in pipeline.groups for rank in group) for pipeline in layout.pipelines),
            layers=tuple(pipeline.layers for pipeline in layout.pipelines),
            micro_batches=tuple(pipeline.micro_batches for pipeline in layout.pipelines),
            predicted_us=float(price.iteration_us.mean()),
            moved_layers=len(moved),
            cost_us=self._change_us(plan, moved),
            parts=shares_of(layout),
            recompute=tuple(role.rank for role in plan.roles if role.recompute),
            sequence_parallel=tuple(role.rank for role in plan.roles if role.sequence_parallel),
        )
        self.scored[layout], self.plans[candidate] = candidate, plan
        return candidate, price.last

    def change_us(self, plan: Plan) -> float:
        """What the change to a plan costs."""
        return self._change_us(plan, moved_layers(self.current, plan))

    def _change_us(self, plan: Plan, moved: Sequence[tuple[int, float]]) -> float:
        regroup_us = 0.0 if alike(self.current, plan) else self.state.regroup_us
        return regroup_us + sum(self.state.layer_bytes[layer] * part for layer, part in moved) / self.state.bytes_per_us

    def objective(self, candidate: Candidate) -> float:
        """Mean iteration time with the cost of the change spread over the rest of the run."""
        unseen = UNSEEN if self.plans[candidate].widest >= 2 * self._measured else 1.0
        return unseen * candidate.predicted_us + candidate.cost_us / self.remaining

    def job(self, degree: int, members: int) -> PlannerJob:
        """The mean micro-batch of the recent batches as the planners take it, on healthy groups of this TP degree, with the
        memory of so many ranks for each stage."""
        place = self.state.cost.device_class, degree
        of_layers, of_head = self.costs.at(place)
        layer_us = {kind: float(us.mean()) for kind, us in of_layers.items()}
        head_us = sum(float(us.mean()) for us in of_head.values())
        own_us = sum(cost.own_us for cost in self.costs.cost.costs_at(place).values())
        whole_us = self.crews.healthy_us(degree)
        with_sums = whole_us / sum(layer_us.values())
        return PlannerJob(
            n_layers=self.current.n_layers,
            micro_batches=len(self.current.routes),
            forward_us=layer_us["F"] * with_sums,
            backward_us=sum(us for kind, us in layer_us.items() if kind != "F") * with_sums,
            head_layers=head_us / whole_us,
            own_layers=own_us / whole_us,
            message_us=self.state.cost.message_us,
            schedule="zb-h1" if splits_backward(self.current.schedule) else "1f1b",
            layer_bytes=self.room.layer_bytes(members) if self.room else 0.0,
            activation_bytes=self.room.activation_bytes if self.room else 0.0,
            given_bytes=self.room.given_bytes if self.room else None,
            capacity_bytes=self.room.rank_bytes * members if self.room else None,
        )

    def may(self, layout: Layout) -> bool:
        """Whether nothing but the levels in force differs from the first plan, and groups are on one node each."""
        working = [pipeline for pipeline in layout.pipelines if pipeline.groups]
        counts = [pipeline.micro_batches for pipeline in working]
        return (
            self._within_nodes(working)
            and ("dp" in self.levels or max(counts) - min(counts) <= 1)
            and ("pp" in self.levels or all(pipeline.layers in self._first_layers for pipeline in working))
        )

    def _within_nodes(self, pipelines: Iterable[Pipeline]) -> bool:
        size = self.state.ranks_per_node
        return not size or all(len({rank // size for rank in group}) <= 1 for one in pipelines for group in one.groups)

    def within_levels(self, layout: Layout) -> Layout:
        """Without the dp level: with the same micro-batches for all who work."""
        if "dp" in self.levels:
            return layout
        counts = iter(split_evenly(layout.micro_batches, sum(bool(one.groups) for one in layout.pipelines)))
        pipelines = (
            msgspec.structs.replace(one, micro_batches=next(counts)) if one.groups else one for one in layout.pipelines
        )
        return msgspec.structs.replace(layout, pipelines=tuple(pipelines))

    @property
    def sound(self) -> bool:
        """Whether all who began the run are there and healthy."""
        slow = any(speed < 1.0 for kinds in self.state.speeds.values() for speed in kinds.values())
        return not slow and self.state.alive.issuperset(self.state.origin.ranks)

    def least_us(self, pipelines: Iterable[Pipeline]) -> dict[Pipeline, float]:
        """No iteration in which one of these takes part is shorter, in the mean over the batches: a bound for the mean
        micro-batch, for a makespan is convex in the times of its chunks. 0 where none is known."""
        asked = dict.fromkeys(pipelines)
        new = dict[int, list[Pipeline]]()
        for pipeline in asked:
            if pipeline not in self._least_us:
                new.setdefault(len(pipeline.groups), []).append(pipeline)
        for of_one_depth in new.values():
            self._least_us.update(zip(of_one_depth, self._bounds_us(of_one_depth), strict=True))
        return {pipeline: self._least_us[pipeline] for pipeline in asked}

    def _bounds_us(self, pipelines: Sequence[Pipeline]) -> list[float]:
        """Of pipelines that have as many stages, all at once."""
        schedule, stages = self.current.schedule, len(pipelines[0].groups)
        if schedule not in ("1f1b", "zb-h1") or self.current.layer_weights or not stages:
            return [0.0] * len(pipelines)
        number: dict[tuple[Group, tuple[int, ...]], int] = {}
        rows = [
            [number.setdefault(crew, len(number)) for crew in zip(one.groups, one.shares or ((),) * stages, strict=True)]
            for one in pipelines
        ]
        least_us = np.array([self.crews.time_of(Crew(*crew)).least_us for crew in number])
        of_kind = least_us[np.array(rows)]  # [pipeline, stage, kind, layer or head or chunk by itself]
        times = np.array([one.layers for one in pipelines])[:, :, None] * of_kind[..., 0] + of_kind[..., 2]
        times[:, -1] += of_kind[:, -1, :, 1]
        count, message_us = np.array([one.micro_batches for one in pipelines]), self.state.cost.message_us
        if schedule == "1f1b":
            bound_us = pipeline_bound_us(times[..., 0], times[..., 1], count, message_us)
        else:  # a stage works after the first forward has come, and its last backward has to go all the way back
            before = np.cumsum(times, axis=1) - times + message_us * np.arange(stages)[:, None]
            back_us = count[:, None] * (times[..., 0] + times[..., 1]) + before[..., 1]
            bound_us = (before[..., 0] + np.maximum(count[:, None] * times.sum(axis=2), back_us)).max(axis=1)
        once = np.array([len(set(one.groups)) == stages for one in pipelines])
        found: list[float] = np.where(once, self.state.cost.least_end_us + bound_us, 0.0).tolist()
        return found

    def times_by_kind(self) -> dict[int, RankTimes]:
        """Mean F, B and W of a micro-batch on each living rank."""

        def each(costs: dict[str, Array], rank: int) -> tuple[float, ...]:
            return tuple(float(costs[kind].mean()) / speed_of(self.state.speeds, rank, kind) for kind in CHUNK_KINDS)

        places = {rank: self.costs.at(self.state.cost.place_of(rank)) for rank in self.state.alive}
        return {rank: (each(of_layers, rank), each(of_head, rank)) for rank, (of_layers, of_head) in places.items()}

    def paths_task(self) -> PathsTask:
        """The same summed up over the layers, as lending takes it."""
        cost, weights = self.state.cost, np.array(self.current.layer_weights or (1.0,) * self.current.n_layers)
        until_us: dict[ChunkKind, dict[int, list[float]]] = {kind: {} for kind in CHUNK_KINDS}
        for rank, (of_layer, of_head) in self.times_by_kind().items():
            for kind, layer_us, head_us in zip(CHUNK_KINDS, of_layer, of_head, strict=True):
                until = np.concatenate([[0.0], np.cumsum(weights * layer_us)])
                until[-1] += head_us
                until_us[kind][rank] = until.tolist()
        message_us = cost.message_us + cost.message_token_us * float(self.costs.tokens.mean())
        return PathsTask(until_us=until_us, message_us=message_us)


def _score_searched(bench: PlanBench, best: Candidate) -> None:
    """Of a run that began with a searched plan: that plan while its ranks live, and AdaPtis' search anew for the replicas and
    micro-batches of the best plan so far, at the estimated speeds (planners/adaptis/searched.py)."""
    origin, version = bench.state.origin, bench.current.plan_version + 1
    name, first = "the searched plan of the start", searched_layout(origin)
    if bench.state.alive.issuperset(origin.ranks) and bench.fitted(name, first, origin.renumbered(version)):
        bench.score(name, first)
    ranks = [tuple(dict.fromkeys(members)) for members in best.members]
    cost = bench.state.cost
    for room in dict.fromkeys((bench.room, None)):  # what fits only where ranks recompute is found without
        try:
            anew = searched_anew(
                version,
                [*zip(ranks, best.micro_batches, strict=True)],
                bench.times_by_kind(),
                message_us=cost.message_us + cost.message_token_us * float(bench.costs.tokens.mean()),
                n_layers=bench.current.n_layers,
                layer_weights=bench.current.layer_weights,
                room=room,
            )
        except PlanError:
            continue
        name, layout = "searched anew (AdaPtis)", searched_layout(anew)
        if bench.fitted(name, layout, anew):
            bench.score(name, layout)
            return


def _score_lent(bench: PlanBench) -> None:
    """Of a run that began with a searched plan: that plan, or where some of its ranks are gone the present one, with single
    layers of single micro-batches lent to other ranks (planners/adaptis/lending.py); the best on the recent batches."""
    origin, current = bench.state.origin, bench.current
    start = origin if bench.state.alive.issuperset(origin.ranks) else current
    if bench.sound or start.teams:
        return

    def plan_of(found: OrderedPaths) -> Plan:
        plan = found.plan(start, current.plan_version + 1)
        return plan if bench.room is None else bench.room.fitted(plan, current)

    def price_us(found: OrderedPaths) -> float:
        with suppress(PlanError):
            plan = plan_of(found)
            return float(bench.pricing.of(plan).iteration_us.mean()) + bench.change_us(plan) / bench.remaining
        return inf

    found = lent(bench.paths_task(), paths_of(start), MORE_KEPT * most_kept(start), LENT_ACTIONS, price_us)
    if found is not None:
        plan = plan_of(found)
        name, layout = "layers lent to other ranks (searched)", holding_layout(plan)
        if bench.fitted(name, layout, plan):
            bench.score(name, layout)


def best_of(bench: PlanBench, options: SchedulerOptions) -> Candidate:
    """The best candidate found; `bench.scored` then holds all of them. Raises `PlanError` when none has room."""
    found: dict[Layout, str] = {}
    for name, one in _named(bench, options):
        layout = bench.within_levels(one)
        if layout not in found and bench.may(layout) and bench.fitted(name, layout):
            found[layout] = name
    # What lending gains is no price for a layer that the next death takes along.
    tolerant = any(map(two_hold_each_layer, found))
    layouts = {
        layout: bench.score(name, layout)
        for layout, name in found.items()
        if not (layout.moves and tolerant) or two_hold_each_layer(layout)
    }
    if not layouts:
        raise PlanError("the ranks that are left have no room for the model")
    alone = [layout for layout in layouts if not layout.moves]  # one step from stages that are lent is no plan
    layout = min(alone or layouts, key=lambda key: bench.objective(layouts[key][0]))
    best, last = layouts[layout]
    improved = bool(alone) and "local search" not in options.without
    while improved:
        improved, best_us = False, bench.objective(best)
        steps = [*neighbours(layout, last, bench.crews)]
        least_us = bench.least_us(pipeline for _, changed in steps for pipeline in changed.values())
        for name, changed in steps:
            if bench.pricing.scheduled_actions >= options.search_actions:
                break
            if max(least_us[pipeline] for pipeline in changed.values()) >= best_us:
                continue
            pipelines = tuple(changed.get(replica, one) for replica, one in enumerate(layout.pipelines))
            neighbour = msgspec.structs.replace(layout, pipelines=pipelines)
            if neighbour in bench.scored:
                continue
            if not bench.may(neighbour) or not bench.fitted(name, neighbour):
                continue
            candidate, finishes_last = bench.score(name, neighbour)
            if bench.objective(candidate) < best_us:
                layout, best, last, improved = neighbour, candidate, finishes_last, True
                break
    if bench.state.origin.orders:
        _score_searched(bench, best)
        _score_lent(bench)
    best = min(bench.scored.values(), key=bench.objective)
    limit = bench.objective(best) * (1 + options.tie_percent / 100)
    near = [candidate for candidate in bench.scored.values() if bench.objective(candidate) <= limit]
    if bench.sound and (first := [one for one in near if bench.plans[one].digest == bench.state.origin.digest]):
        return first[0]
    return min(near, key=lambda candidate: (candidate.moved_layers, bench.objective(candidate)))


def _named(bench: PlanBench, options: SchedulerOptions) -> Iterator[tuple[str, Layout]]:
    """The candidates that the local search starts from. A replica whose ranks have no room for the model is none; who lives of
    it can serve in another one."""
    current, crews, speeds = bench.current, bench.crews, bench.state.speeds
    everybody = tuple(
        tuple(crews.fitting(group, current.role_of) for group in groups)
        for groups in members_of(bench.state.origin, bench.state.alive, current)
    )
    if "tp" not in bench.levels:
        teams = {bench.state.origin.team_of.get(rank, (rank,)) for rank in bench.state.origin.ranks}
        everybody = tuple(tuple(group for group in groups if group in teams) for groups in everybody)
    members = tuple(groups if crews.hold(current, tuple(map(crews.cut, groups))) else () for groups in everybody)
    slowest = {rank: min(speeds.get(rank, {}).values(), default=1.0) for rank in bench.state.alive}
    leavers = sorted((rank for rank in slowest if slowest[rank] < options.leave_below), key=lambda rank: (slowest[rank], rank))
    degree = max((len(group) for groups in everybody for group in groups), default=1)
    job = bench.job(degree, degree)
    may_leave = options.leave_below > 0
    found = list[tuple[str, Layout]]()
    if any(members):
        yield from named_layouts(current, bench.state.origin, members, crews, leavers)
        found += joint_layout(current, staffed(members, crews), crews, job, may_leave=may_leave)
        if "tp" in bench.levels and bench.state.prices_sums and not bench.sound:
            slow = [rank for rank, speed in slowest.items() if speed < 1.0]
            found += joined_layouts(current, bench.state.origin, members, crews, slow)
    at_least = min(2, max(1, sum(map(bool, members))))
    found += anew_layout(current, staffed(everybody, crews), crews, job, at_least=at_least, may_leave=may_leave)
    found += levels_layouts(
        current,
        bench.state.origin,
        bench.state.alive,
        crews,
        bench.job(bench.state.origin.widest, 1),
        per_node=bench.state.ranks_per_node,
        levels=bench.levels,
    )
    yield from ((name, weighted(layout, current.layer_weights)) for name, layout in found if name not in options.without)
