"""The layout: a plan in short, one entry per group of devices and none per micro-batch.

A `Plan` names every rank and every micro-batch, which is right for executing and too much for 98,304 devices. Planners,
scheduler, policies and simulator decide on a `Layout`; `to_plan` makes the plan of it.

>>> layout = uniform_layout(tp=2, pp=2, replicas=range(2), n_layers=8, micro_batches=6)
>>> [(pipeline.groups, pipeline.layers, pipeline.micro_batches) for pipeline in layout.pipelines]
[(((0, 1), (2, 3)), (4, 4), 3), (((4, 5), (6, 7)), (4, 4), 3)]
>>> len(to_plan(layout, 8).roles)
8
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, count
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.plan import (
    PASSES,
    SCHEDULES,
    Hop,
    Plan,
    PlanError,
    Role,
    Route,
    split_evenly,
    stage_order_of,
    validate,
)
from unskew.analytics.core.sharing import split_work
from unskew.analytics.shards.parts import parts_by

PACE = 20
"""The pace of a healthy group of the nominal degree."""

Ints = NDArray[np.int64]
Group = tuple[int, ...]
"""Devices that execute a stage as one (tensor parallelism); () = nobody."""


class Pipeline(msgspec.Struct, frozen=True, gc=False):
    """One replica: group `groups[s]` executes the `layers[s]` layers of stage s; the work of an empty group is moved.

    A group comes up at several stages where a micro-batch passes it more than once (interleaved 1F1B, ZB-V). For the order
    of the chunks: `paces[s]`, how long a layer takes at stage s, and `in_flight[s]`, how many micro-batches it may have.
    `shares[s]`: what each member of group s has of its layers, in any unit; () = the same.
    """

    replica: int
    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    micro_batches: int
    paces: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()


class Move(msgspec.Struct, frozen=True, gc=False):
    """Stage `stage` of these micro-batches (numbered within their home `source`) is executed by replica `target`."""

    stage: int
    source: int
    target: int
    micro_batches: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Who does what: pipelines, and stage work moved between their replicas. Arrays are [pipeline, stage].

    `staggered`: each stage steps its optimiser by itself, so that the next iteration begins at the first stages while the last
    ones end this one (ReCycle); priced by the simulator, executed by nobody yet.

    `routed`: the plan itself, where its micro-batches take ways that pipelines and moves cannot say, as after a death; the
    pipelines then say who holds what.
    """

    pipelines: tuple[Pipeline, ...]
    moves: tuple[Move, ...] = ()
    schedule: str = "1f1b"
    staggered: bool = False
    routed: Plan | None = None

    @cached_property
    def micro_batches(self) -> int:
        return sum(pipeline.micro_batches for pipeline in self.pipelines)

    @cached_property
    def devices(self) -> frozenset[int]:
        """The devices that work."""
        return frozenset(self.members.tolist())

    @cached_property
    def members(self) -> Ints:
        """The devices of all groups in a row, pipeline by pipeline."""
        groups = chain.from_iterable(pipeline.groups for pipeline in self.pipelines)
        return np.fromiter(chain.from_iterable(groups), dtype=np.int64)

    @cached_property
    def degrees(self) -> Ints:
        """How many devices each group has; 0 also where a pipeline has fewer stages than another."""
        return _table([[len(group) for group in pipeline.groups] for pipeline in self.pipelines])

    @cached_property
    def layers(self) -> Ints:
        return _table([pipeline.layers for pipeline in self.pipelines])

    def slowest(self, speeds: NDArray[np.float64]) -> NDArray[np.float64]:
        """The speed of each group's slowest device, given [device]; 0 where nobody works."""
        sizes = self.degrees.ravel()
        found = np.zeros(len(sizes))
        if len(self.members):
            begins = (np.cumsum(sizes) - sizes)[sizes > 0]
            found[sizes > 0] = np.minimum.reduceat(speeds[self.members], begins)
        return found.reshape(self.degrees.shape)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Pipelines that exchange work; most stand alone."""
        place = {pipeline.replica: index for index, pipeline in enumerate(self.pipelines)}
        leader = list(range(len(self.pipelines)))

        def find(index: int) -> int:
            while leader[index] != index:
                index = leader[index]
            return index

        for move in self.moves:
            leader[find(place[move.target])] = find(place[move.source])
        members: dict[int, list[int]] = defaultdict(list)
        for index in range(len(self.pipelines)):
            members[find(index)].append(index)
        return tuple(Component(tuple(indices), self.by_group(indices)) for indices in members.values())

    def by_group(self, indices: Sequence[int] | None = None, *, width: int | None = None) -> Layout:
        """The pipelines `indices` (all) with one rank for each group and replicas counted from 0; moves within them stay.

        Ranks count the groups; with `width` (stages) they are ``replica * width + stage`` by the replicas' own numbers.
        """
        chosen = [self.pipelines[index] for index in (range(len(self.pipelines)) if indices is None else indices)]
        place = {pipeline.replica: position for position, pipeline in enumerate(chosen)}
        ranks = count()
        pipelines, rank_of = [], dict[Group, Group]()
        for position, part in enumerate(chosen):
            numbers = ranks if width is None else count(part.replica * width)
            groups = tuple((rank,) if group else () for group, rank in zip(part.groups, numbers, strict=False))
            rank_of.update(zip(part.groups, groups, strict=True))
            pipelines.append(Pipeline(position, groups, part.layers, part.micro_batches, part.paces, part.in_flight))
        moves = tuple(
            Move(move.stage, place[move.source], place[move.target], move.micro_batches)
            for move in self.moves
            if move.source in place
        )
        whole = self.routed if indices is None else None
        return Layout(tuple(pipelines), moves, self.schedule, routed=whole and _by_group(whole, rank_of))


class Component(msgspec.Struct, frozen=True):
    """Pipelines `indices` of a layout, and `shape`: the same as a layout of its own that names no devices (a cache's key)."""

    indices: tuple[int, ...]
    shape: Layout


def _by_group(plan: Plan, rank_of: Mapping[Group, Group]) -> Plan:
    """The plan with one rank for each group that executes; who holds layers and executes nothing has no role."""
    roles = (
        msgspec.structs.replace(plan.role_of[group[0]], rank=rank, shard=0, part=None)
        for group, numbers in rank_of.items()
        for rank in numbers
    )
    routes = (
        msgspec.structs.replace(route, hops=tuple(msgspec.structs.replace(hop, ranks=rank_of[hop.ranks]) for hop in route.hops))
        for route in plan.routes
    )
    return msgspec.structs.replace(plan, roles=tuple(roles), routes=tuple(routes), paces=(), in_flight=())


def _table(rows: Sequence[Sequence[int]]) -> Ints:
    """Rows of any length as an array, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def uniform_layout(
    *, tp: int, pp: int, replicas: Iterable[int], n_layers: int, micro_batches: int, schedule: str = "1f1b"
) -> Layout:
    """These replicas, whole, layers and micro-batches split evenly: device = (replica * PP + stage) * TP + shard."""
    chosen = list(replicas)
    if not chosen:
        raise PlanError("no replica is left")
    layers = tuple(split_evenly(n_layers, pp * PASSES[schedule]))
    shares = split_evenly(micro_batches, len(chosen))
    return Layout(
        tuple(
            Pipeline(replica, _groups(tp, pp, replica, schedule), layers, share)
            for replica, share in zip(chosen, shares, strict=True)
        ),
        schedule=schedule,
    )


@lru_cache(maxsize=4096)
def _groups(tp: int, pp: int, replica: int, schedule: str) -> tuple[Group, ...]:
    firsts = range(replica * pp * tp, (replica + 1) * pp * tp, tp)
    return tuple(stage_order_of(schedule, [tuple(range(first, first + tp)) for first in firsts]))


def rank_layout(
    members: Iterable[Iterable[int]], layers: Iterable[Iterable[int]], micro_batches: Iterable[int], schedule: str
) -> Layout:
    """Pipelines of single ranks: `members[d]` in the order in which a micro-batch passes them, `layers[d]` their layers."""
    return Layout(
        tuple(
            Pipeline(replica, tuple((rank,) for rank in ranks), tuple(sizes), share)
            for replica, (ranks, sizes, share) in enumerate(zip(members, layers, micro_batches, strict=True))
        ),
        schedule=schedule,
    )


def weighted(layout: Layout, layer_weights: Sequence[float]) -> Layout:
    """The layout with its stages' shares of the layers as shares of what the layers cost; as it is where all cost the same."""
    if not layer_weights:
        return layout
    pipelines = []
    for pipeline in layout.pipelines:
        sizes = [size for size in pipeline.layers if size]
        counts = iter(split_work(layer_weights, sizes) if sizes else ())  # a replica may have lost all its ranks
        layers = tuple(next(counts) if size else 0 for size in pipeline.layers)
        pipelines.append(msgspec.structs.replace(pipeline, layers=layers))
    return msgspec.structs.replace(layout, pipelines=tuple(pipelines))


def to_plan(layout: Layout, n_layers: int, *, plan_version: int = 0) -> Plan:
    """The plan that ranks execute; ranks are the layout's devices. Raises `PlanError` when it is illegal.

    Micro-batches are dealt to their homes in turn, in proportion, so that heavy neighbours spread.
    """
    if layout.routed is not None:
        return layout.routed.renumbered(plan_version)
    pipelines = {pipeline.replica: pipeline for pipeline in layout.pipelines}
    moved = {(move.source, number, move.stage): move.target for move in layout.moves for number in move.micro_batches}
    hops: dict[tuple[int, tuple[int, ...]], tuple[Hop, ...]] = {}
    shares = [] if moved else [_share(one, n_layers, layout.schedule) for one in layout.pipelines]
    apart = {one.replica: own for one, (_, own) in zip(layout.pipelines, shares, strict=False)}
    routes = []
    homes = ((home.replica, j, home.micro_batches) for home in layout.pipelines for j in range(home.micro_batches))
    for number, (home, j, _) in enumerate(sorted(homes, key=lambda entry: ((entry[1] + 1) / entry[2], entry[0]))):
        if not moved:
            routes.append(Route(micro_batch=number, replica=home, hops=apart[home]))
            continue
        layers = pipelines[home].layers
        executors = tuple(moved.get((home, j, stage), home) for stage in range(len(layers)))
        if (home, executors) not in hops:
            parts = zip(executors, accumulate(layers, initial=0), layers, strict=False)
            hops[home, executors] = tuple(hop for replica, *part in parts for hop in _hops(pipelines[replica], *part))
        routes.append(Route(micro_batch=number, replica=home, hops=hops[home, executors]))
    roles = tuple(chain.from_iterable(map(_roles, layout.pipelines) if moved else (own for own, _ in shares)))
    plan = Plan(
        plan_version=plan_version,
        n_layers=n_layers,
        schedule=layout.schedule,
        roles=roles,
        routes=tuple(routes),
        paces=_per_role(layout, roles, "paces", PACE),
        in_flight=_per_role(layout, roles, "in_flight", 0),
    )
    if moved or len(plan.role_of) < len(roles):
        validate(plan)
    return plan


@lru_cache(maxsize=4096)
def _share(pipeline: Pipeline, n_layers: int, schedule: str) -> tuple[tuple[Role, ...], tuple[Hop, ...]]:
    """What a pipeline that exchanges no work adds to a plan: its roles, and the hops of its micro-batches. Plans that are tried
    one after the other differ in a pipeline or two, so what was made and found legal is not made and checked again."""
    roles, hops = _roles(pipeline), _hops(pipeline, 0, n_layers)
    routes = (Route(micro_batch=0, replica=pipeline.replica, hops=hops),) if pipeline.micro_batches else ()
    validate(Plan(plan_version=0, n_layers=n_layers, schedule=schedule, roles=roles, routes=routes))
    return roles, hops


def _per_role(layout: Layout, roles: Sequence[Role], what: Literal["paces", "in_flight"], usual: int) -> tuple[int, ...]:
    """What the pipelines state per stage, per role; () where nothing is stated."""
    stated = {
        rank: value
        for pipeline in layout.pipelines
        for group, value in zip(pipeline.groups, getattr(pipeline, what), strict=False)
        for rank in group
    }
    return tuple(stated.get(role.rank, usual) for role in roles) if stated else ()


def _hops(pipeline: Pipeline, first: int, n: int) -> tuple[Hop, ...]:
    """Layers ``[first, first + n)`` at one pipeline: one hop per stage of it that holds a part of them."""
    hops, begin = [], 0
    for group, size in zip(pipeline.groups, pipeline.layers, strict=True):
        low, high = max(first, begin), min(first + n, begin + size)
        if low < high:
            hops.append(Hop(first_layer=low, n_layers=high - low, ranks=group))
        begin += size
    return tuple(hops)


def _roles(pipeline: Pipeline) -> tuple[Role, ...]:
    """A role for each device that holds layers; ranges that touch are one."""
    stage_of: dict[Group | int, int] = {}
    held: dict[Group, list[tuple[int, int]]] = defaultdict(list)
    stated = {group: shares for group, shares in zip(pipeline.groups, pipeline.shares, strict=False) if shares}
    end = 0
    for place, (group, size) in enumerate(zip(pipeline.groups, pipeline.layers, strict=True)):
        stage_of.setdefault(group or place, len(stage_of))
        if size:
            ranges = held[group]
            if ranges and sum(ranges[-1]) == end:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
            else:
                ranges.append((end, size))
        end += size
    return tuple(
        Role(
            rank=rank,
            replica=pipeline.replica,
            stage=stage_of[group],
            first_layer=first,
            n_layers=n,
            shard=shard,
            more=tuple(more),
            part=part,
        )
        for group, ((first, n), *more) in held.items()
        for shard, (rank, part) in enumerate(zip(group, parts_by(stated.get(group, (1,) * len(group))), strict=True))
    )


def plan_from_partition(
    *,
    plan_version: int,
    n_layers: int,
    schedule: str,
    members: Iterable[Iterable[int]],
    layers: Iterable[Iterable[int]],
    micro_batches: Iterable[int],
) -> Plan:
    """The plan of `rank_layout`. Raises `PlanError`.

    >>> plan = plan_from_partition(
    ...     plan_version=0, n_layers=4, schedule="interleaved", members=[[0, 1, 0, 1]], layers=[[1, 1, 1, 1]], micro_batches=[2]
    ... )
    >>> [role.ranges for role in plan.roles]
    [((0, 1), (2, 1)), ((1, 1), (3, 1))]
    """
    return to_plan(rank_layout(members, layers, micro_batches, schedule), n_layers, plan_version=plan_version)


def uniform_plan(
    *,
    tp: int,
    pp: int,
    dp: int,
    n_layers: int,
    micro_batches: int,
    schedule: str = "1f1b",
    layer_weights: tuple[float, ...] = (),
) -> Plan:
    """The plan a run starts with: rank = (replica * PP + stage) * TP + shard; `layer_weights` as in `Plan`. Raises `PlanError`
    for an impossible layout."""
    if min(tp, pp, dp) < 1:
        raise PlanError(f"tp, pp and dp must each be at least 1, not {tp}, {pp}, {dp}")
    check_enough(pp, dp, n_layers, micro_batches, schedule)
    layout = uniform_layout(tp=tp, pp=pp, replicas=range(dp), n_layers=n_layers, micro_batches=micro_batches, schedule=schedule)
    return msgspec.structs.replace(to_plan(weighted(layout, layer_weights), n_layers), layer_weights=layer_weights)


def check_enough(pp: int, dp: int, n_layers: int, micro_batches: int, schedule: str) -> None:
    """Raises `PlanError` where these stages and replicas would have no layer or no micro-batch each."""
    if schedule not in PASSES:
        raise PlanError(f"schedule={schedule} is not known, allowed: {', '.join(SCHEDULES)}")
    stages = pp * PASSES[schedule]
    if n_layers < stages:
        passes = "" if PASSES[schedule] == 1 else f" passed {PASSES[schedule]} times by schedule={schedule}"
        raise PlanError(f"layers={n_layers} cannot fill pp={pp} stages{passes}: at least {stages} layers are needed")
    if micro_batches < dp:
        raise PlanError(f"micro_batches={micro_batches} cannot feed dp={dp} replicas: at least one per replica is needed")
