"""Candidate plans for a set of living ranks: each replica a pipeline of its own, ranks in the order of the run's first plan.

The layer counts of a replica and the micro-batch counts of all replicas both come from `share_out` (core/sharing.py), exact for
its own question (the busiest part least busy); where layers differ, `weighted` then moves the boundaries; the pipeline's
fill and drain are left to the evaluator and local search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout, Pipeline, rank_layout, weighted
from unskew.analytics.core.plan import PASSES, Plan, PlanError, Route, ruled, split_evenly, stage_order_of
from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.problem import PlannerCluster, PlannerJob

Members = tuple[tuple[int, ...], ...]
"""Per replica the ranks that a micro-batch passes, in order: under a looped schedule a rank comes up more than once
(`stage_order_of`).

() for a replica that has none left.
"""


class RankTime(msgspec.Struct, frozen=True):
    """Mean microseconds of F + B of one micro-batch on a rank at its estimated speed: per layer, and for the output head."""

    layer_us: float
    head_us: float


def members_of(origin: Plan, alive: frozenset[int], plan: Plan | None = None) -> Members:
    """The living ranks of each replica in the stage order of the run's first plan, as its schedule passes them.

    A rank that the first plan did not know keeps its place in the present `plan`; else it takes that of one that is gone, else
    it comes last in the replica with the fewest ranks.
    """
    places = {role.rank: (role.replica, role.stage) for role in origin.roles}
    vacant = sorted(place for rank, place in places.items() if rank not in alive)
    members = [
        [(stage, rank) for rank, (replica, stage) in places.items() if replica == one and rank in alive]
        for one in range(1 + max(replica for replica, _ in places.values()))
    ]
    for rank in sorted(alive - places.keys()):
        role = plan.role_of.get(rank) if plan is not None else None
        if role is not None:
            replica, stage = role.replica, role.stage
        elif vacant:
            replica, stage = vacant.pop(0)
        else:
            replica = min(range(len(members)), key=lambda one: len(members[one]))
            stage = 1 + max((stage for stage, _ in members[replica]), default=-1)
        members[replica].append((stage, rank))
    return tuple(_stage_order(origin, [rank for _, rank in sorted(ranks)]) for ranks in members)


def _stage_order(plan: Plan, ranks: Sequence[int]) -> tuple[int, ...]:
    """As the plan's schedule passes these ranks; once each where the replica has too few layers for more."""
    stage_order = stage_order_of(plan.schedule, ranks) if plan.schedule in PASSES else list(ranks)
    return tuple(stage_order if len(stage_order) <= plan.n_layers else ranks)


def named_layouts(
    plan: Plan, origin: Plan, members: Members, times: Mapping[int, RankTime], leavers: Sequence[int]
) -> Iterator[tuple[str, Layout]]:
    """The candidates with a name. `leavers` are slow ranks, the slowest first: doing without the first 1, 2, ... is tried."""
    if len(times) == len(origin.roles):
        counts = tuple(sum(route.replica == replica for route in origin.routes) for replica in range(len(members)))
        sizes_then = tuple(_layers_held(origin, ranks) for ranks in members)
        if all(sizes_then):
            yield "as at the start of the run", rank_layout(members, sizes_then, counts, ruled(plan.schedule))
    on_duty = tuple(tuple(rank for rank in ranks if rank in plan.role_of) for ranks in members)
    held = tuple(_layers_held(plan, ranks) for ranks in on_duty)
    # Not by `Route.replica`: after a death the replica of a rerouted micro-batch may have nobody on duty.
    counts = tuple(sum(_passes(route, ranks) for route in plan.routes) for ranks in on_duty)
    if (
        on_duty != members
        and all(sizes for ranks, sizes in zip(on_duty, held, strict=True) if ranks)
        and sum(counts) == len(plan.routes)
    ):
        yield "as it is", rank_layout(on_duty, held, counts, ruled(plan.schedule))
    by_speed = tuple(_layers_by_speed(plan, ranks, times) for ranks in members)
    yield "layers and micro-batches by speed", weighted(layout_from(plan, members, by_speed, times), plan.layer_weights)
    kept = tuple(_layers_held(plan, ranks) or fresh for ranks, fresh in zip(members, by_speed, strict=True))
    yield "micro-batches by speed, layers where they are", layout_from(plan, members, kept, times)
    if len({len(ranks) for ranks in members}) == 1:
        stages = [max((times[rank] for rank in stage), key=lambda time: time.layer_us) for stage in zip(*members, strict=True)]
        sizes = tuple(share_out(plan.n_layers, _layer_parts(stages)))
        even = tuple(split_evenly(len(plan.routes), len(members)))
        layout = rank_layout(members, (sizes,) * len(members), even, ruled(plan.schedule))
        yield "one partition for all replicas (ResiHP)", weighted(layout, plan.layer_weights)
    for count in range(1, len(leavers) + 1):
        without = tuple(tuple(rank for rank in ranks if rank not in leavers[:count]) for ranks in members)
        if _enough(without, members):
            layers = tuple(_layers_by_speed(plan, ranks, times) for ranks in without)
            layout = weighted(layout_from(plan, without, layers, times), plan.layer_weights)
            yield f"without {', '.join(f'rank {rank}' for rank in leavers[:count])}", layout


def joint_layout(
    plan: Plan, members: Members, times: Mapping[int, RankTime], job: PlannerJob, *, may_leave: bool
) -> Iterator[tuple[str, Layout]]:
    """The joint planner's layout, when it has one of this form: every living rank takes part unless it may be left out.

    Not for schedules that pass ranks more than once, whose pipelines the planner does not know.
    """
    if any(len(set(ranks)) < len(ranks) for ranks in members) or job.micro_batches < len(members):
        return
    speeds = np.zeros((len(members), max(map(len, members)), 1))
    for replica, ranks in enumerate(members):
        for stage, rank in enumerate(ranks):
            speeds[replica, stage] = job.layer_us / times[rank].layer_us
    try:
        found = plan_joint(PlannerCluster(job=job, speeds=speeds), compare=False).layout.pipelines
    except PlanError:
        return
    kept = [[stage for stage, size in enumerate(pipeline.layers) if size] for pipeline in found]
    leave = any(len(stages) < len(ranks) for stages, ranks in zip(kept, members, strict=True))
    if leave and not (may_leave and _enough(kept, members)):
        return
    layout = rank_layout(
        [[ranks[stage] for stage in stages] for stages, ranks in zip(kept, members, strict=True)],
        [[size for size in pipeline.layers if size] for pipeline in found],
        [pipeline.micro_batches if stages else 0 for pipeline, stages in zip(found, kept, strict=True)],
        ruled(plan.schedule),
    )
    if layout.micro_batches == len(plan.routes):
        yield "joint planner", layout


def _enough(left: Sequence[Sequence[int]], members: Sequence[Sequence[int]]) -> bool:
    """Whether two replicas keep ranks, where two have some: with a single one the next death would take layers with it."""
    return sum(map(bool, left)) >= min(2, sum(map(bool, members)))


def _layers_by_speed(plan: Plan, ranks: Sequence[int], times: Mapping[int, RankTime]) -> tuple[int, ...]:
    return tuple(share_out(plan.n_layers, _layer_parts([times[rank] for rank in ranks]))) if ranks else ()


def _layer_parts(stages: Sequence[RankTime]) -> list[tuple[float, float]]:
    """What `share_out` needs: the last stage also has the output head."""
    return [(0.0, time.layer_us) for time in stages[:-1]] + [(stages[-1].head_us, stages[-1].layer_us)]


def _passes(route: Route, ranks: Sequence[int]) -> bool:
    """Whether the micro-batch passes just these ranks in this order; one that comes up twice in a row has one leg."""
    return [hop.ranks for hop in route.hops] == [(rank,) for rank, _ in groupby(ranks)]


def _layers_held(plan: Plan, ranks: Sequence[int]) -> tuple[int, ...]:
    """The layer counts under `plan` if a micro-batch passes just these ranks in this order, else ().

    Where a rank comes up twice in a row, its one leg counts as two.
    """
    runs = [(rank, len(list(group))) for rank, group in groupby(ranks)]
    for route in plan.routes:
        if _passes(route, ranks):
            sizes = [
                size for hop, (_, times) in zip(route.hops, runs, strict=True) for size in split_evenly(hop.n_layers, times)
            ]
            return tuple(sizes) if all(sizes) else ()
    return ()


def layout_from(plan: Plan, members: Members, layers: tuple[tuple[int, ...], ...], times: Mapping[int, RankTime]) -> Layout:
    """The layout whose micro-batch counts let the replicas finish together, by ``fill + (m - 1) * busiest stage``."""
    parts = []
    for ranks, sizes in zip(members, layers, strict=True):
        if ranks:
            costs = _layer_parts([times[rank] for rank in ranks])
            stages = [fixed + each * size for (fixed, each), size in zip(costs, sizes, strict=True)]
            busiest = max(sum(us for at, us in zip(ranks, stages, strict=True) if at == rank) for rank in ranks)
            parts.append((sum(stages) - busiest, busiest))
    counts = iter(share_out(len(plan.routes), parts))
    return rank_layout(members, layers, [next(counts) if ranks else 0 for ranks in members], ruled(plan.schedule))


def neighbours(layout: Layout, busiest: int) -> Iterator[tuple[str, Layout]]:
    """One step from `layout`: a layer between two ranks of replica `busiest`, or a micro-batch from it to another replica."""

    def changed(changes: dict[int, Pipeline]) -> Layout:
        pipelines = tuple(changes.get(replica, pipeline) for replica, pipeline in enumerate(layout.pipelines))
        return msgspec.structs.replace(layout, pipelines=pipelines)

    busy = layout.pipelines[busiest]
    for giver, size in enumerate(busy.layers):
        for taker, (rank,) in enumerate(busy.groups):
            if giver != taker and size > 1:
                moved = tuple(size - (s == giver) + (s == taker) for s, size in enumerate(busy.layers))
                yield (
                    f"refined: a layer from rank {busy.groups[giver][0]} to rank {rank}",
                    changed({busiest: msgspec.structs.replace(busy, layers=moved)}),
                )
    for taker, other in enumerate(layout.pipelines):
        if taker != busiest and other.micro_batches > 0 and busy.micro_batches > 1:
            counts = ((busy, busy.micro_batches - 1), (other, other.micro_batches + 1))
            pair = {one.replica: msgspec.structs.replace(one, micro_batches=count) for one, count in counts}
            yield f"refined: a micro-batch from replica {busiest} to {taker}", changed(pair)
