"""Paths of micro-batches that differ, each over any ranks, and an order for them by the rule of `dispatch` (dispatch.py), which
has one pipeline whose micro-batches all pass the same stages."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from unskew.analytics.core.plan import Hop, Plan, Route, splits_backward, validate
from unskew.analytics.pipeline.actions import action_of
from unskew.analytics.pipeline.notation import with_orders
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.planners.adaptis.dispatch import DispatchOptions
from unskew.collector.events import CHUNK_KINDS, ChunkKind

Leg = tuple[int, int, int]
"""(rank, first layer, layers)."""
Path = tuple[Leg, ...]
Paths = tuple[Path, ...]
"""[micro-batch]."""
ROUNDING_US = 1e-3


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
    """Paths, when their last chunk ends (infinite where the limit leaves no room), and each rank's (kind, micro-batch, hop) in
    order."""

    paths: Paths
    makespan_us: float
    lists: Mapping[int, Sequence[tuple[ChunkKind, int, int]]]

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
            plan, {rank: [action_of(routes[m], kind, hop) for kind, m, hop in self.lists[rank]] for rank in held}
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
    return _Orders(task, paths, knobs, works_us, most_us).run()


class _Orders:
    def __init__(
        self, task: PathsTask, paths: Paths, knobs: DispatchOptions, works_us: Mapping[int, float], most_us: float
    ) -> None:
        self.task, self.paths, self.knobs = task, paths, knobs
        ranks = {rank for path in paths for rank, _, _ in path}
        self.free_at, self.kept = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0)
        # How long a rank may still wait for others.
        self.may_wait_us = {rank: most_us - works_us[rank] for rank in ranks}
        # What waits at a rank: (turn, arrival, micro-batch, hop).
        self.waiting: dict[ChunkKind, dict[int, list[tuple[tuple[int, ...], float, int, int]]]] = {
            kind: {rank: [] for rank in ranks} for kind in CHUNK_KINDS
        }
        self.lists: dict[int, list[tuple[ChunkKind, int, int]]] = {rank: [] for rank in ranks}
        self.room_after = [*map(_kept_later, paths)]
        self.events = [(0.0, rank) for rank in sorted(ranks)]
        for number, path in enumerate(paths):
            self.waiting["F"][path[0][0]].append((self._turn("F", number, 0), 0.0, number, 0))

    def run(self) -> OrderedPaths:
        left = len(CHUNK_KINDS) * sum(map(len, self.paths))
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now < self.free_at[rank]:
                continue
            kind, place, soon = self._choose(rank, now)
            if kind is not None:
                self.may_wait_us[rank] -= now - self.free_at[rank]
                if self.may_wait_us[rank] < -ROUNDING_US:
                    break
                self._start(rank, kind, place, now)
                left -= 1
            elif soon < inf:
                heapq.heappush(self.events, (soon, rank))
        return OrderedPaths(self.paths, inf if left else max(self.free_at.values()), self.lists)

    def _choose(self, rank: int, now: float) -> tuple[ChunkKind | None, int, float]:
        """(what to start, its place among what waits, when to look again)."""
        soon = inf
        for kind in CHUNK_KINDS[1::-1]:
            best, best_turn = -1, tuple[int, ...]()
            for place, (turn, arrival, number, hop) in enumerate(self.waiting[kind][rank]):
                if kind == "F" and self.kept[rank] + self.room_after[number][hop] > self.knobs.limit:
                    continue
                if arrival > now:
                    soon = min(soon, arrival)
                elif best < 0 or turn < best_turn:
                    best, best_turn = place, turn
            if best >= 0:
                return kind, best, now
        if weights := self.waiting["W"][rank]:
            place = min(range(len(weights)), key=weights.__getitem__)
            _, _, number, hop = weights[place]
            if soon - now >= self.knobs.patience * self.task.leg_us("W", self.paths[number][hop]):
                return "W", place, now
        return None, -1, soon

    def _turn(self, kind: ChunkKind, number: int, hop: int) -> tuple[int, ...]:
        """Of what is there the least goes first."""
        if kind != "F" or self.knobs.turn == "lowest":
            return number, -hop
        first = self.paths[number][hop][1]
        return (-first, number) if self.knobs.turn == "latest" else (number // len(self.free_at), first, number)

    def _start(self, rank: int, kind: ChunkKind, place: int, now: float) -> None:
        _, _, number, hop = self.waiting[kind][rank].pop(place)
        path = self.paths[number]
        self.lists[rank].append((kind, number, hop))
        end = self.free_at[rank] = now + self.task.leg_us(kind, path[hop])
        heapq.heappush(self.events, (end, rank))
        if kind == "F":
            self.kept[rank] += path[hop][2]
            if hop + 1 < len(path):
                self._arrive("F", number, hop + 1, rank, now)
            else:
                self._arrive("B", number, hop, rank, now)
        elif kind == "B":
            self._arrive("W", number, hop, rank, now)
            if hop > 0:
                self._arrive("B", number, hop - 1, rank, now)
        else:
            self.kept[rank] -= path[hop][2]

    def _arrive(self, kind: ChunkKind, number: int, hop: int, source: int, now: float) -> None:
        target = self.paths[number][hop][0]
        arrival = self.free_at[source] + (0.0 if target == source else self.task.message_us)
        self.waiting[kind][target].append((self._turn(kind, number, hop), arrival, number, hop))
        if target != source:
            heapq.heappush(self.events, (max(now, self.free_at[target]), target))


def _kept_later(path: Path) -> list[int]:
    """Per leg: its layers and those of the rank's later legs, so that what has begun can always end."""
    sums, found = defaultdict[int, int](int), []
    for rank, _, n in reversed(path):
        sums[rank] += n
        found.append(sums[rank])
    return found[::-1]
