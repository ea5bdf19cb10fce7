"""What a simulated job runs: pipelines of TP groups, micro-batches, and stage work handed to other replicas.

A `Layout` is the simulator's short form of a plan (analytics/core/plan.py): one entry per TP group instead of per rank, so that
98,304 devices stay a small value. `to_plan` gives the plan itself, with one rank per TP group.

>>> from unskew.analytics.cluster.job import JOBS
>>> layout = healthy(JOBS["llama2-7b"])
>>> [pipeline.layers for pipeline in layout.pipelines], layout.micro_batches
([(16, 16), (16, 16)], 8)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.cluster.job import Job
from unskew.analytics.core.plan import Hop, Plan, Role, Route, split_evenly, validate

Ints = NDArray[np.int64]


class LayoutError(ValueError):
    """A layout that cannot train; one sentence."""


class Pipeline(msgspec.Struct, frozen=True):
    """One replica: `groups[s]` are the active devices of stage s (empty: its work is moved), `layers[s]` their layers."""

    replica: int
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    micro_batches: int


class Move(msgspec.Struct, frozen=True):
    """These micro-batches of pipeline `home` (numbered within it) have stage `stage` executed by pipeline `executor`."""

    home: int
    stage: int
    executor: int
    micro_batches: tuple[int, ...]


def dealt(home: int, stage: int, total: int, counts: Mapping[int, int]) -> tuple[Move, ...]:
    """Moves that hand ``sum(counts)`` of the home's `total` micro-batches to executors (executor -> how many), spread evenly.

    >>> [(move.executor, move.micro_batches) for move in dealt(2, 0, 8, {0: 2, 1: 2})]
    [(0, (1, 5)), (1, (3, 7))]
    """
    moving = sum(counts.values())
    places = [number for number in range(total) if (number + 1) * moving // total > number * moving // total]
    given: dict[int, list[int]] = defaultdict(list)
    for place, executor in zip(places, _interleaved(counts), strict=True):
        given[executor].append(place)
    return tuple(Move(home, stage, executor, tuple(numbers)) for executor, numbers in given.items())


class Layout(msgspec.Struct, frozen=True, dict=True):
    """`schedule` is one of analytics/pipeline/schedule.py's."""

    pipelines: tuple[Pipeline, ...]
    moves: tuple[Move, ...] = ()
    schedule: str = "1f1b"

    @cached_property
    def micro_batches(self) -> int:
        return sum(pipeline.micro_batches for pipeline in self.pipelines)

    @cached_property
    def devices(self) -> frozenset[int]:
        """The slots that work."""
        return frozenset(self.members[0].tolist())

    @cached_property
    def members(self) -> tuple[Ints, Ints, Ints]:
        """All active devices in a row, where each non-empty group begins in it, and how many devices each group has."""
        groups = [group for pipeline in self.pipelines for group in pipeline.groups]
        sizes = np.array([len(group) for group in groups], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(groups), dtype=np.int64)
        return flat, (np.cumsum(sizes) - sizes)[sizes > 0], sizes

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Pipelines that exchange work; most stand alone."""
        leader = list(range(len(self.pipelines)))

        def find(index: int) -> int:
            while leader[index] != index:
                index = leader[index]
            return index

        for move in self.moves:
            leader[find(move.executor)] = find(move.home)
        members: dict[int, list[int]] = defaultdict(list)
        for index in range(len(self.pipelines)):
            members[find(index)].append(index)
        return tuple(self._component(indices) for indices in members.values())

    def _component(self, indices: Sequence[int]) -> Component:
        place = {index: position for position, index in enumerate(indices)}
        pipelines = tuple(
            Pipeline(position, tuple((0,) if group else () for group in part.groups), part.layers, part.micro_batches)
            for position, part in enumerate(self.pipelines[index] for index in indices)
        )
        moves = tuple(
            Move(place[move.home], move.stage, place[move.executor], move.micro_batches)
            for move in self.moves
            if move.home in place
        )
        return Component(tuple(indices), Layout(pipelines, moves, self.schedule))


class Component(msgspec.Struct, frozen=True):
    """Pipelines `indices` of a layout, and `shape`: the same as a layout of its own that names no devices (a cache's key)."""

    indices: tuple[int, ...]
    shape: Layout


@lru_cache(maxsize=64)
def healthy(job: Job) -> Layout:
    """The layout that a job starts with."""
    return uniform(job, range(job.dp))


def uniform(job: Job, replicas: Iterable[int], *, micro_batches: int | None = None) -> Layout:
    """These replicas, whole, with even layers and micro-batches (of the whole job unless given)."""
    chosen = list(replicas)
    if not chosen:
        raise LayoutError("no replica is left")
    shares = split_evenly(job.micro_batches if micro_batches is None else micro_batches, len(chosen))
    layers = tuple(split_evenly(job.n_layers, job.pp))
    return Layout(
        tuple(Pipeline(replica, _groups(job, replica), layers, count) for replica, count in zip(chosen, shares, strict=True))
    )


@lru_cache(maxsize=4096)
def _groups(job: Job, replica: int) -> tuple[tuple[int, ...], ...]:
    return tuple(job.group(replica, stage) for stage in range(job.pp))


def proportional(total: int, weights: Sequence[float], *, least: int = 0) -> list[int]:
    """`total` in whole shares so that the largest share/weight is as small as possible (greedy, exact for this objective).

    >>> proportional(12, [1.0, 0.4, 1.0], least=1)
    [5, 2, 5]
    """
    if any(weight <= 0 for weight in weights):
        raise LayoutError("a share needs a positive weight")
    shares = [least] * len(weights)
    ends = [((least + 1) / weight, index) for index, weight in enumerate(weights)]
    heapify(ends)
    for _ in range(total - least * len(weights)):
        index = ends[0][1]
        shares[index] += 1
        heapreplace(ends, ((shares[index] + 1) / weights[index], index))
    return shares


def to_plan(layout: Layout, pipelines: Sequence[int], n_layers: int, *, width: int | None = None) -> Plan:
    """The chosen pipelines as a plan, a rank for each TP group; raises `PlanError` when it is illegal.

    Ranks count the groups in order; with `width` (the job's stages) a rank is ``replica * width + stage``.
    """
    rank_of: dict[tuple[int, int], int] = {}
    roles: list[Role] = []
    for index in pipelines:
        pipeline, first = layout.pipelines[index], 0
        for stage, n in enumerate(pipeline.layers):
            rank = rank_of[index, stage] = len(rank_of) if width is None else pipeline.replica * width + stage
            if pipeline.groups[stage] and n:
                roles.append(Role(rank=rank, replica=index, stage=stage, first_layer=first, n_layers=n))
            first += n
    moved = {(move.home, move.stage, number): move.executor for move in layout.moves for number in move.micro_batches}
    homes = _interleaved({index: layout.pipelines[index].micro_batches for index in pipelines})
    routes, seen = [], dict.fromkeys(pipelines, 0)
    for number, home in enumerate(homes):
        local, first, hops = seen[home], 0, list[Hop]()
        seen[home] += 1
        for stage, n in enumerate(layout.pipelines[home].layers):
            executor = moved.get((home, stage, local), home)
            if n:
                hops += _hops(layout.pipelines[executor], executor, first, n, rank_of)
            first += n
        routes.append(Route(micro_batch=number, replica=home, hops=tuple(hops)))
    plan = Plan(plan_version=0, n_layers=n_layers, schedule=layout.schedule, roles=tuple(roles), routes=tuple(routes))
    validate(plan)
    return plan


def _hops(pipeline: Pipeline, index: int, first: int, n: int, rank_of: dict[tuple[int, int], int]) -> list[Hop]:
    """Layers ``[first, first + n)`` at one pipeline: one hop per stage of it that holds a part of them."""
    hops, begin = [], 0
    for stage, size in enumerate(pipeline.layers):
        low, high = max(first, begin), min(first + n, begin + size)
        if low < high:
            hops.append(Hop(first_layer=low, n_layers=high - low, ranks=(rank_of[index, stage],)))
        begin += size
    return hops


def _interleaved(counts: Mapping[int, int]) -> list[int]:
    """Every key as often as its count, spread evenly.

    >>> _interleaved({0: 2, 1: 4})
    [1, 0, 1, 1, 0, 1]
    """
    places = [((2 * number + 1) / (2 * count), key) for key, count in counts.items() for number in range(count)]
    return [key for _, key in sorted(places)]
