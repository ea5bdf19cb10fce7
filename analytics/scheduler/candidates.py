"""Candidate plans for a set of living ranks: each replica a pipeline of its own, ranks in the order of the run's first plan.

A stage is executed by a crew (crews.py): a rank, or a tensor-parallel group with its members' shares. Shares, the layer counts
of a replica and the micro-batch counts of all replicas all come from `share_out` (core/sharing.py), exact for its own question
(the busiest part least busy); where layers differ, `weighted` then moves the boundaries; the pipeline's fill and drain are left
to the evaluator and local search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, groupby

import msgspec
import numpy as np

from unskew.analytics.core.layout import Group, Layout, Pipeline, weighted
from unskew.analytics.core.plan import PASSES, Plan, PlanError, Route, ruled, split_evenly, stage_order_of
from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.joint.anew import plan_anew
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.problem import Level, PlannerCluster, PlannerJob, working
from unskew.analytics.planners.resihp.progressive import plan_progressive
from unskew.analytics.scheduler.crews import Crew, Crews, crew_in, layer_parts

Members = tuple[tuple[Group, ...], ...]
"""Per replica the groups of ranks that a micro-batch passes, in order: under a looped schedule a group comes up more than once
(`stage_order_of`).

() for a replica that has none left.
"""
Staffed = tuple[tuple[Crew, ...], ...]
"""The same with everybody's shares."""

AS_BEFORE = ("as at the start of the run", "as it is")
"""Candidates that keep the order of their chunks."""
ANEW_CREWS = 512
"""Up to so many stages of all replicas are laid out anew: with more it takes seconds."""
LEVELS_RANKS = 128
"""Up to so many ranks ResiHP's levels are tried: they play the whole job for each partition and threshold."""
LEVELS_SCHEDULES = ("1f1b", "zb-h1")
"""The schedules that they plan for."""


def members_of(origin: Plan, alive: frozenset[int], plan: Plan | None = None) -> Members:
    """The living ranks of each replica in the stage order of the run's first plan, as its schedule passes them.

    A rank that the first plan did not know keeps its place in the present `plan`; else it takes that of one that is gone, else
    it comes last in the replica with the fewest ranks: as a stage of its own, or in its smallest tensor-parallel group. A run
    that began without such groups has none: two ranks with one place are stages that follow each other.
    """
    places = {role.rank: (role.replica, role.stage, role.shard) for role in origin.roles}
    vacant = sorted(place for rank, place in places.items() if rank not in alive)
    members = [
        [(stage, shard, rank) for rank, (replica, stage, shard) in places.items() if replica == one and rank in alive]
        for one in range(1 + max(replica for replica, _, _ in places.values()))
    ]
    in_groups = any(role.part is not None for role in origin.roles)
    for rank in sorted(alive - places.keys()):
        if plan is not None and rank in plan.role_of:
            role = plan.role_of[rank]
            # `plan` numbers the stages that are left: where its group is, those of the first plan know.
            known = (places[other] for other in plan.team_of.get(rank, ()) if other in places)
            replica, stage, _ = next(known, (role.replica, role.stage, 0))
            shard = role.shard
        elif vacant:
            replica, stage, shard = vacant.pop(0)
        else:
            replica = min(range(len(members)), key=lambda one: len(members[one]))
            stages = [stage for stage, _, _ in members[replica]]
            stage = (
                min(stages, key=lambda one: (stages.count(one), -one)) if in_groups and stages else 1 + max(stages, default=-1)
            )
            shard = stages.count(stage)
        members[replica].append((stage, shard, rank))
    stages_of = [groupby(sorted(ranks), key=lambda place: place[0] if in_groups else place) for ranks in members]
    return tuple(_stage_order(origin, [tuple(rank for _, _, rank in stage) for _, stage in stages]) for stages in stages_of)


def _stage_order(plan: Plan, groups: Sequence[Group]) -> tuple[Group, ...]:
    """As the plan's schedule passes these groups; once each where the replica has too few layers for more."""
    stage_order = stage_order_of(plan.schedule, groups) if plan.schedule in PASSES else list(groups)
    return tuple(stage_order if len(stage_order) <= plan.n_layers else groups)


def staffed(members: Members, crews: Crews) -> Staffed:
    """Each group with shares by its members' speeds. Raises `PlanError`."""
    return tuple(tuple(map(crews.cut, groups)) for groups in members)


def as_now(plan: Plan, members: Members) -> Staffed:
    """The groups with the shares that they have in `plan`, which must have all of them."""
    return tuple(tuple(crew_in(plan, group) for group in groups) for groups in members)


def crew_layout(members: Staffed, layers: Sequence[Sequence[int]], micro_batches: Sequence[int], schedule: str) -> Layout:
    """Pipelines of these crews: `layers[d]` the layers of replica d, stage by stage."""
    return Layout(
        tuple(
            Pipeline(
                replica,
                tuple(crew.ranks for crew in crews),
                tuple(sizes),
                share,
                shares=tuple(crew.shares for crew in crews) if any(crew.shares for crew in crews) else (),
            )
            for replica, (crews, sizes, share) in enumerate(zip(members, layers, micro_batches, strict=True))
        ),
        schedule=schedule,
    )


def named_layouts(
    plan: Plan, origin: Plan, members: Members, crews: Crews, leavers: Sequence[int]
) -> Iterator[tuple[str, Layout]]:
    """The candidates with a name. `leavers` are slow ranks, the slowest first: doing without the first 1, 2, ... is tried."""
    schedule = ruled(plan.schedule)
    everybody = {rank for groups in members for group in groups for rank in group}
    if len(everybody) == len(origin.roles):
        counts = tuple(sum(route.replica == replica for route in origin.routes) for replica in range(len(members)))
        sizes_then = tuple(_layers_held(origin, groups) for groups in members)
        if all(sizes_then):
            yield "as at the start of the run", crew_layout(as_now(origin, members), sizes_then, counts, schedule)
    on_duty = tuple(
        tuple(left for group in groups if (left := tuple(rank for rank in group if rank in plan.role_of))) for groups in members
    )
    held = tuple(_layers_held(plan, groups) for groups in on_duty)
    # Not by `Route.replica`: after a death the replica of a rerouted micro-batch may have nobody on duty.
    passed = Counter(map(_path, plan.routes))
    counts = tuple(passed[_path_through(groups)] for groups in on_duty)
    as_they_are = all(sizes for groups, sizes in zip(on_duty, held, strict=True) if groups) and sum(counts) == len(plan.routes)
    if on_duty != members and as_they_are:
        yield "as it is", crew_layout(as_now(plan, on_duty), held, counts, schedule)
    if plan.teams and as_they_are:
        yield "groups cut by speed", crew_layout(staffed(on_duty, crews), held, counts, schedule)
    by_speed = staffed(members, crews)
    layers = tuple(crews.layers_of(plan, one) for one in by_speed)
    yield "layers and micro-batches by speed", weighted(layout_from(plan, by_speed, layers, crews), plan.layer_weights)
    even = tuple(split_evenly(len(plan.routes), len(members)))
    if all(members):
        yield "layers by speed, micro-batches even", weighted(crew_layout(by_speed, layers, even, schedule), plan.layer_weights)
    kept = [
        (as_now(plan, (groups,))[0], sizes) if (sizes := _layers_held(plan, groups)) else fresh
        for groups, fresh in zip(members, zip(by_speed, layers, strict=True), strict=True)
    ]
    where_they_are = layout_from(plan, tuple(one for one, _ in kept), tuple(sizes for _, sizes in kept), crews)
    yield "micro-batches by speed, layers where they are", where_they_are
    if len({len(one) for one in by_speed}) == 1:
        stages = [max(map(crews.time_of, stage), key=lambda time: time.layer_us) for stage in zip(*by_speed, strict=True)]
        sizes = tuple(share_out(plan.n_layers, layer_parts(stages)))
        layout = crew_layout(by_speed, (sizes,) * len(members), even, schedule)
        yield "one partition for all replicas (ResiHP)", weighted(layout, plan.layer_weights)
    for count in range(1, len(leavers) + 1):
        without = tuple(
            tuple(left for group in groups if (left := tuple(rank for rank in group if rank not in leavers[:count])))
            for groups in members
        )
        if _enough(without, members):
            cut = staffed(without, crews)
            with suppress(PlanError):  # who is left may have no room
                layout = layout_from(plan, cut, tuple(crews.layers_of(plan, one) for one in cut), crews)
                yield f"without {', '.join(f'rank {rank}' for rank in leavers[:count])}", weighted(layout, plan.layer_weights)


def joined_layouts(
    plan: Plan, origin: Plan, members: Members, crews: Crews, slow: Collection[int]
) -> Iterator[tuple[str, Layout]]:
    """Stages of tensor-parallel groups joined in pairs, then these again: fewer bubbles for larger sums. In all replicas, in
    whole ones, where nobody is `slow` or gone, and in the others. Not for schedules that pass ranks more than once."""
    if not plan.teams or any(len(set(groups)) < len(groups) for groups in members):
        return
    began = Counter(role.replica for role in origin.roles)
    ranks_of = [[rank for group in groups for rank in group] for groups in members]
    whole = [len(ranks) >= began[replica] and not {*ranks} & {*slow} for replica, ranks in enumerate(ranks_of)]
    wider = members
    while max(map(len, wider), default=0) > 1:
        wider = tuple(tuple(sum(groups[at : at + 2], ()) for at in range(0, len(groups), 2)) for groups in wider)
        for where, chosen in (("", (True, False)), (" in whole replicas", (True,)), (" in the other replicas", (False,))):
            some = tuple(new if at in chosen else old for new, old, at in zip(wider, members, whole, strict=True))
            with suppress(PlanError):  # more members than a layer has units, or no room
                cut = staffed(some, crews)
                layout = layout_from(plan, cut, tuple(crews.layers_of(plan, one) for one in cut), crews)
                yield f"stages joined to groups of {max(map(len, sum(wider, ())))}{where}", weighted(layout, plan.layer_weights)


def joint_layout(
    plan: Plan, members: Staffed, crews: Crews, job: PlannerJob, *, may_leave: bool
) -> Iterator[tuple[str, Layout]]:
    """The joint planner's layout, when it has one of this form, with each crew as one device: all take part unless one may be
    left out.

    Not for schedules that pass ranks more than once, whose pipelines the planner does not know.
    """
    if any(len(set(one)) < len(one) for one in members) or job.micro_batches < len(members):
        return
    speeds = np.zeros((len(members), max(map(len, members)), 1))
    for replica, one in enumerate(members):
        for stage, crew in enumerate(one):
            speeds[replica, stage] = job.layer_us / crews.time_of(crew).layer_us
    try:
        found = plan_joint(PlannerCluster(job=job, speeds=speeds), compare=False).layout.pipelines
    except PlanError:
        return
    kept = [[stage for stage, size in enumerate(pipeline.layers) if size] for pipeline in found]
    leave = any(len(stages) < len(one) for stages, one in zip(kept, members, strict=True))
    if leave and not (may_leave and _enough(kept, members)):
        return
    layout = crew_layout(
        tuple(tuple(one[stage] for stage in stages) for stages, one in zip(kept, members, strict=True)),
        [[size for size in pipeline.layers if size] for pipeline in found],
        [pipeline.micro_batches if stages else 0 for pipeline, stages in zip(found, kept, strict=True)],
        ruled(plan.schedule),
    )
    if layout.micro_batches == len(plan.routes):
        yield "joint planner", layout


def levels_layouts(
    plan: Plan, origin: Plan, alive: Collection[int], crews: Crews, job: PlannerJob, *, per_node: int, levels: Collection[Level]
) -> Iterator[tuple[str, Layout]]:
    """ResiHP's levels (planners/resihp/progressive.py) for the groups of an even first plan, as its policy has them, stages
    that replicas lend each other included; `job`: on groups as wide as theirs, with the memory of one rank."""
    dp, pp, tp = (1 + max(getattr(role, name) for role in origin.roles) for name in ("replica", "stage", "shard"))
    even = all(role.rank == (role.replica * pp + role.stage) * tp + role.shard for role in origin.roles)
    if not even or len(origin.roles) != dp * pp * tp or len(origin.roles) > LEVELS_RANKS:
        return
    if plan.layer_weights or origin.schedule not in LEVELS_SCHEDULES:
        return
    speeds = np.array([crews.speed_in(rank, tp) if rank in alive else 0.0 for rank in range(dp * pp * tp)])
    cluster = PlannerCluster(
        job=job,
        speeds=speeds.reshape(dp, pp, tp),
        nodes=(np.arange(dp * pp * tp, dtype=np.int64) // per_node).reshape(dp, pp, tp) if per_node else None,
    )
    with suppress(PlanError):
        found = working(cluster, plan_progressive(cluster, levels=frozenset(levels)).layout)
        cut = tuple(_cut(pipeline, crews) for pipeline in found.pipelines)
        yield "ResiHP's three levels", msgspec.structs.replace(found, pipelines=cut)


def _cut(pipeline: Pipeline, crews: Crews) -> Pipeline:
    """With each group cut by its members' speeds; a stage whose work others do has none."""
    shares = tuple(crews.cut(group).shares if group else () for group in pipeline.groups)
    return msgspec.structs.replace(pipeline, shares=shares if any(shares) else ())


def anew_layout(
    plan: Plan, members: Staffed, crews: Crews, job: PlannerJob, *, at_least: int, may_leave: bool
) -> Iterator[tuple[str, Layout]]:
    """All crews laid out as if the run began on them: any of them as any stage of any of `at_least` replicas or more, as
    planners/joint/anew.py deals them. Not for schedules that pass ranks more than once."""
    width = max(map(len, members), default=0)
    if any(len(set(one)) < len(one) for one in members) or not 0 < sum(map(len, members)) <= ANEW_CREWS:
        return
    everybody = {replica * width + stage: crew for replica, one in enumerate(members) for stage, crew in enumerate(one)}
    speeds = np.zeros((len(members), width, 1))
    for place, crew in everybody.items():
        speeds[place // width, place % width] = job.layer_us / crews.time_of(crew).layer_us
    try:
        found = plan_anew(PlannerCluster(job=job, speeds=speeds)).layout.pipelines
    except PlanError:
        return
    rows = [
        [(everybody[group[0]], size) for group, size in zip(one.groups, one.layers, strict=True) if group and size]
        for one in found
    ]
    used = sum(map(len, rows))
    if len(rows) < at_least or (used < len(everybody) and not may_leave):
        return
    yield (
        "laid out anew",
        crew_layout(
            tuple(tuple(crew for crew, _ in row) for row in rows),
            [[size for _, size in row] for row in rows],
            [one.micro_batches for one in found],
            ruled(plan.schedule),
        ),
    )


def _enough(left: Sequence[Sequence[object]], members: Sequence[Sequence[object]]) -> bool:
    """Whether two replicas keep ranks, where two have some: with a single one the next death would take layers with it."""
    return sum(map(bool, left)) >= min(2, sum(map(bool, members)))


def two_hold_each_layer(layout: Layout) -> bool:
    """Whether the next death takes no layer with it; a stage that another replica executes is held there alone."""
    held = Counter(
        layer
        for pipeline in layout.pipelines
        for group, since, size in zip(pipeline.groups, accumulate(pipeline.layers, initial=0), pipeline.layers, strict=False)
        if group
        for layer in range(since, since + size)
    )
    return min(held.values(), default=0) > 1


def _path(route: Route) -> tuple[Group, ...]:
    """The groups that the micro-batch passes."""
    return tuple(hop.ranks for hop in route.hops)


def _path_through(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The same of one that passes just these groups in this order; one that comes up twice in a row has one leg."""
    return tuple(group for group, _ in groupby(groups))


def _layers_held(plan: Plan, groups: Sequence[Group]) -> tuple[int, ...]:
    """The layer counts under `plan` if a micro-batch passes just these groups in this order, else ().

    Where a group comes up twice in a row, its one leg counts as two.
    """
    runs, path = [(group, len(list(same))) for group, same in groupby(groups)], _path_through(groups)
    for route in plan.routes:
        if _path(route) == path:
            sizes = [
                size for hop, (_, times) in zip(route.hops, runs, strict=True) for size in split_evenly(hop.n_layers, times)
            ]
            return tuple(sizes) if all(sizes) else ()
    return ()


def layout_from(plan: Plan, members: Staffed, layers: tuple[tuple[int, ...], ...], crews: Crews) -> Layout:
    """The layout whose micro-batch counts let the replicas finish together, by ``fill + (m - 1) * busiest stage``."""
    parts = []
    for one, sizes in zip(members, layers, strict=True):
        if one:
            costs = layer_parts([*map(crews.time_of, one)])
            stages = [fixed + each * size for (fixed, each), size in zip(costs, sizes, strict=True)]
            busiest = max(sum(us for at, us in zip(one, stages, strict=True) if at == crew) for crew in one)
            parts.append((sum(stages) - busiest, busiest))
    counts = iter(share_out(len(plan.routes), parts))
    return crew_layout(members, layers, [next(counts) if one else 0 for one in members], ruled(plan.schedule))


def neighbours(layout: Layout, busiest: int, crews: Crews) -> Iterator[tuple[str, dict[int, Pipeline]]]:
    """One step from `layout`: a layer, or a member, between two crews of replica `busiest`, or a micro-batch from it to another
    replica; what it is called, and the pipelines that it changes."""
    busy = layout.pipelines[busiest]
    name_of = {group: Crew(group).name for group in busy.groups}
    for giver, size in enumerate(busy.layers):
        for taker, group in enumerate(busy.groups):
            if giver != taker and size > 1:
                moved = tuple(size - (s == giver) + (s == taker) for s, size in enumerate(busy.layers))
                changed = msgspec.structs.replace(busy, layers=moved)
                yield f"refined: a layer from {name_of[busy.groups[giver]]} to {name_of[group]}", {busiest: changed}
    for giving in dict.fromkeys(group for group in busy.groups if len(group) > 1):
        for taking in dict.fromkeys(group for group in busy.groups if group != giving):
            for rank in giving:
                with suppress(PlanError):
                    new = {
                        giving: crews.cut(tuple(member for member in giving if member != rank)),
                        taking: crews.cut((*taking, rank)),
                    }
                    changed = _with_crews(busy, new)
                    yield f"refined: rank {rank} from {name_of[giving]} to {name_of[taking]}", {busiest: changed}
    for taker, other in enumerate(layout.pipelines):
        if taker != busiest and other.micro_batches > 0 and busy.micro_batches > 1:
            counts = ((busy, busy.micro_batches - 1), (other, other.micro_batches + 1))
            pair = {one.replica: msgspec.structs.replace(one, micro_batches=count) for one, count in counts}
            yield f"refined: a micro-batch from replica {busiest} to {taker}", pair


def _with_crews(pipeline: Pipeline, new: dict[Group, Crew]) -> Pipeline:
    """With other crews in place of some groups."""
    groups, shares = [*pipeline.groups], [*(pipeline.shares or ((),) * len(pipeline.groups))]
    for stage, group in enumerate(pipeline.groups):
        if group in new:
            groups[stage], shares[stage] = new[group].ranks, new[group].shares
    return msgspec.structs.replace(pipeline, groups=tuple(groups), shares=tuple(shares) if any(shares) else ())
