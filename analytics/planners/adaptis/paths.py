"""Paths of micro-batches that differ, each over any ranks, and an order for them by the rule of dispatch.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from unskew.analytics.core.plan import Hop, Plan, Route, splits_backward, validate
from unskew.analytics.pipeline.actions import action_of
from unskew.analytics.pipeline.notation import with_orders
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.planners.adaptis.dispatch import DispatchOptions, DispatchRule, Legs, Step, Waiting
from unskew.collector.events import CHUNK_KINDS, ChunkKind

Leg = tuple[int, int, int]
"""(rank, first layer, layers)."""
Path = tuple[Leg, ...]
Paths = tuple[Path, ...]
"""[micro-batch]."""


class PathsTask(msgspec.Struct, frozen=True, kw_only=True):
    """`until_us[kind][rank][l]`: a rank's time for the layers below l of a mean micro-batch; `message_us` from rank to rank."""

    until_us: Mapping[ChunkKind, Mapping[int, Sequence[float]]]
    message_us: float = 0.0

    def leg_us(self, kind: ChunkKind, leg: Leg) -> float:
        """What a chunk takes."""
        rank, first, n = leg
        until_us = self.until_us[kind][rank]
        return until_us[first + n] - until_us[first]

    def works_us(self, leg: Leg) -> float:
        """What all kinds of chunks take together."""
        return sum(self.leg_us(kind, leg) for kind in CHUNK_KINDS)


class OrderedPaths(msgspec.Struct, frozen=True):
    """Paths, when their last chunk ends (infinite where the limit leaves no room), and each rank's (kind, hop, micro-batch) in
    order."""

    paths: Paths
    makespan_us: float
    lists: Mapping[int, Sequence[Step]]

    @property
    def actions(self) -> int:
        """How many were scheduled."""
        return sum(map(len, self.lists.values()))

    def plan(self, start: Plan, plan_version: int) -> Plan:
        """The plan of these paths; ranks keep replica and stage that they have in `start`. Raises `PlanError`."""
        held = defaultdict[int, set[int]](set)
        for path in self.paths:
            for rank, first, n in path:
                held[rank].update(range(first, first + n))
        roles = []
        for rank, layers in sorted(held.items()):
            ranges: list[tuple[int, int]] = []
            for layer in sorted(layers):
                if ranges and sum(ranges[-1]) == layer:
                    ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
                else:
                    ranges.append((layer, 1))
            (first, n), *more = ranges
            roles.append(msgspec.structs.replace(start.role_of[rank], first_layer=first, n_layers=n, more=tuple(more)))
        routes = tuple(
            Route(
                micro_batch=number,
                replica=start.routes[number].replica,
                hops=tuple(Hop(first_layer=first, n_layers=n, ranks=(rank,)) for rank, first, n in path),
            )
            for number, path in enumerate(self.paths)
        )
        plan = Plan(
            plan_version=plan_version,
            n_layers=start.n_layers,
            schedule="searched",
            roles=tuple(roles),
            routes=routes,
            layer_weights=start.layer_weights,
        )
        validate(plan)
        return with_orders(
            plan, {rank: [action_of(routes[number], kind, hop) for kind, hop, number in self.lists[rank]] for rank in held}
        )


def paths_of(plan: Plan) -> Paths:
    """The paths of a plan of single ranks."""
    return tuple(tuple((hop.rank, hop.first_layer, hop.n_layers) for hop in route.hops) for route in plan.routes)


def most_kept(plan: Plan) -> int:
    """Layers of micro-batches that the rank with the most keeps at once, from F to the end of W."""
    split, most = splits_backward(plan.schedule), 0
    for actions in build_schedule(plan).by_rank.values():
        kept = 0
        for action in actions:
            kept += action.n_layers if action.kind == "F" else -action.n_layers if action.kind == ("W" if split else "B") else 0
            most = max(most, kept)
    return most


def joined(path: Sequence[Leg]) -> Path:
    """Without empty legs, and neighbouring legs of one rank as one."""
    legs: list[Leg] = []
    for rank, first, n in path:
        if n and legs and legs[-1][0] == rank:
            legs[-1] = rank, legs[-1][1], legs[-1][2] + n
        elif n:
            legs.append((rank, first, n))
    return tuple(legs)


def ordered(
    task: PathsTask, paths: Paths, knobs: DispatchOptions, works_us: Mapping[int, float], most_us: float = inf
) -> OrderedPaths:
    """The rule of `dispatch`, on paths; `knobs.limit` in layers of micro-batches that a rank keeps; `works_us`: what each rank
    has to do. Given up, as one that never ends, once some rank cannot end by `most_us`."""
    rule = _Orders(task, paths, knobs, works_us, most_us)
    return OrderedPaths(paths, rule.makespan_us(), rule.lists)


class _Orders(DispatchRule):
    """Paths differ, so that all that waits at a rank has to be looked at."""

    def __init__(
        self, task: PathsTask, paths: Paths, knobs: DispatchOptions, works_us: Mapping[int, float], most_us: float
    ) -> None:
        legs = {path: _legs(task, path) for path in dict.fromkeys(paths)}
        may_wait_us = {rank: most_us - works_us[rank] for one in legs.values() for rank in one.ranks}
        super().__init__(knobs, [legs[path] for path in paths], task.message_us, may_wait_us)
        self.paths = paths
        # What waits at a rank: (turn, arrival, micro-batch, hop).
        self.waiting: dict[ChunkKind, dict[int, list[tuple[tuple[int, ...], float, int, int]]]] = {
            kind: {rank: [] for rank in may_wait_us} for kind in CHUNK_KINDS
        }
        for number in range(len(paths)):
            self._await("F", number, 0, 0.0)

    def _ready(self, kind: ChunkKind, rank: int, now: float) -> tuple[Waiting | None, float]:
        best, soon = -1, inf
        best_turn: tuple[int, ...] = ()
        legs, left = self.legs, self.limit - self.kept[rank]
        waiting = self.waiting[kind][rank]
        for place, (turn, arrival, number, hop) in enumerate(waiting):
            if kind == "F" and legs[number].room[hop] > left:
                continue
            if arrival > now:
                soon = min(soon, arrival)
            elif best < 0 or turn < best_turn:
                best, best_turn = place, turn
        return (*waiting[best][2:], best) if best >= 0 else None, soon

    def _begin(self, kind: ChunkKind, rank: int, place: int) -> None:
        del self.waiting[kind][rank][place]

    def _await(self, kind: ChunkKind, number: int, hop: int, arrival: float) -> None:
        rank, first, _ = self.paths[number][hop]
        turn = self._turn(number, first) if kind == "F" else (number, -hop)
        self.waiting[kind][rank].append((turn, arrival, number, hop))


def _legs(task: PathsTask, path: Path) -> Legs:
    ranks, _, layers = zip(*path, strict=True)
    spent_us = {kind: [task.leg_us(kind, leg) for leg in path] for kind in CHUNK_KINDS}
    return Legs(ranks, layers, _kept_later(path), spent_us)


def _kept_later(path: Path) -> list[int]:
    """Per leg: its layers and those of the rank's later legs, so that what has begun can always end."""
    sums, found = defaultdict[int, int](int), []
    for rank, _, n in reversed(path):
        sums[rank] += n
        found.append(sums[rank])
    return found[::-1]
