"""Who executes a stage: one rank, or the members of a tensor-parallel group with their shares of its layers.

A group's layers are shared out like layers among stages: in whole units (attention heads), so that the member that needs most
time needs as little as it can (`share_out`, exact). A unit is what the model can cut, so a real device does what was predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from math import lcm

import msgspec

from unskew.analytics.core.cost import Speeds, speed_of
from unskew.analytics.core.layout import PACE, Group, Layout
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.sharing import share_out, share_out_within
from unskew.analytics.pipeline.memory import Room, in_flight_at
from unskew.analytics.pipeline.prediction import LayerCosts
from unskew.analytics.shards.parts import Part, ends_of
from unskew.analytics.shards.together import blocks, steps_of_sum, sums_in


class Crew(msgspec.Struct, frozen=True):
    """`ranks` in the order of their shards; `shares`: what each has of a layer, in any unit; () = the same."""

    ranks: Group
    shares: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {'-'.join(map(str, self.ranks))}"

    @property
    def weights(self) -> tuple[float, ...]:
        """Each member's share over an equal one."""
        whole = sum(self.shares)
        return tuple(share * len(self.ranks) / whole for share in self.shares) or (1.0,) * len(self.ranks)


class RankTime(msgspec.Struct, frozen=True):
    """Mean microseconds of F + B of one micro-batch on a crew at its estimated speed: per layer, and for the output head.

    `least_us`: per kind of work what it takes at least, (of a layer, of the head, of a chunk by itself): a group's sums left
    out; `own_us`: of the chunks by themselves.
    """

    layer_us: float
    head_us: float
    least_us: tuple[tuple[float, float, float], ...] = ()
    own_us: float = 0.0


KindTimes = tuple[dict[str, float], dict[str, float]]
"""Mean microseconds of a layer and of the head, per kind of work."""


class Crews:
    """What crews take of a mean micro-batch, at the estimated speeds, and how their layers are shared out; `units`: in how many
    a layer can be cut; `room`: what a rank can hold, None = anything; `even`: groups are cut evenly, whatever their speeds."""

    def __init__(self, costs: LayerCosts, speeds: Speeds, units: int, room: Room | None = None, *, even: bool = False) -> None:
        self._costs, self._speeds, self._units, self._even = costs, speeds, units, even
        self.room = room
        self._healthy_us: dict[tuple[str, int], KindTimes] = {}
        self._rank_us: dict[tuple[int, int], KindTimes] = {}
        self._times: dict[Crew, RankTime] = {}
        self._times_of_form: dict[object, RankTime] = {}
        self._summed_us: dict[int, float] = {}
        self._each_us: dict[tuple[int, int], float] = {}
        known = (costs.cost.chunks, *(place.chunks for place in costs.cost.others))
        self._measured_own = any(one.own_us for of in known for one in of.values())
        self._cut: dict[Group, Crew] = {}

    def cut(self, ranks: Group) -> Crew:
        """A group with shares by its members' speeds. Raises `PlanError` for one with more members than a layer has units."""
        if ranks not in self._cut:
            times = [self._layer_us(rank, len(ranks)) for rank in ranks]
            self._cut[ranks] = Crew(ranks) if self._even else cut_by_times(ranks, times, self._units)
        return self._cut[ranks]

    def fitting(self, ranks: Group, on_duty: Collection[int]) -> Group:
        """As many of a group as a layer has units: the fastest, of equals those `on_duty`. For the others it has no place."""
        most = max(self._units, 1)
        if len(ranks) <= most:
            return ranks
        times = {rank: self._layer_us(rank, most) for rank in ranks}
        first = sorted(ranks, key=lambda rank: (times[rank], rank not in on_duty))[:most]
        return tuple(rank for rank in ranks if rank in first)

    def layers_of(self, plan: Plan, members: Sequence[Crew]) -> tuple[int, ...]:
        """Layers for the stages of a pipeline of these crews by their speeds, as far as each has room for its own; () for none.
        Raises `PlanError`."""
        if not members:
            return ()
        times = [*map(self.time_of, members)]
        parts = layer_parts(times)
        if (room := self.room) is None:
            return tuple(share_out(plan.n_layers, parts))

        def end_of(stage: int, first: int) -> int:
            crew = members[stage]
            flying = in_flight_at(plan.schedule, stage, len(members), len(plan.routes))
            size = len(crew.ranks)
            return room.end_of(first, max(crew.weights) / size, flying, members=size, times=members.count(crew))

        return tuple(share_out_within(plan.n_layers, parts, end_of))

    def hold(self, plan: Plan, members: Sequence[Crew]) -> bool:
        """Whether a pipeline of these crews has room for the model."""
        if self.room is not None:
            with suppress(PlanError):
                return bool(self.layers_of(plan, members))
        return self.room is None

    def paced(self, layout: Layout) -> Layout:
        """Where list scheduling orders the chunks of pipelines of their own: with what a layer takes at each stage, the head
        counted, as planners/problem.py has it for whole jobs."""
        if layout.schedule != "zb-h1":
            return layout
        cost = self._costs.cost
        healthy_us = sum(self._healthy((cost.device_class, cost.tp))[0].values())
        pipelines = []
        for pipeline in layout.pipelines:
            crews = map(Crew, pipeline.groups, pipeline.shares or ((),) * len(pipeline.groups))
            times = [self.time_of(crew) for crew in crews]
            layer_us = [time.layer_us for time in times]
            if times:
                layer_us[-1] += times[-1].head_us / pipeline.layers[-1]
            paces = tuple(max(1, round(PACE * us / healthy_us)) for us in layer_us)
            pipelines.append(msgspec.structs.replace(pipeline, paces=paces if len(set(paces)) > 1 else ()))
        return msgspec.structs.replace(layout, pipelines=tuple(pipelines))

    def time_of(self, crew: Crew) -> RankTime:
        """Each kind of chunk is as long as the slowest member takes, with their sums."""
        if crew not in self._times:
            times = [self._of_rank(rank, len(crew.ranks)) for rank in crew.ranks]
            # One of those that are as fast and have as much stands for them, and a crew for those with such members.
            alike = {(id(of[0]), weight): (of, weight) for of, weight in zip(times, crew.weights, strict=True)}
            form = len(crew.ranks), frozenset(alike)
            if form not in self._times_of_form:
                self._times_of_form[form] = self._time(crew.ranks, [*alike.values()])
            self._times[crew] = self._times_of_form[form]
        return self._times[crew]

    def _time(self, ranks: Group, members: Sequence[tuple[KindTimes, float]]) -> RankTime:
        """Of a crew of these ranks; `members`: what they take of an equal part, and each one's share over that."""

        def slowest(part: int, kind: str) -> float:
            return max([weight * of[part][kind] for of, weight in members])

        kinds = [*self._costs.cost.chunks]
        layer_us, head_us = (sum([slowest(part, kind) for kind in kinds]) for part in (0, 1))
        own_us = {kind: self._own_us(ranks, kind) for kind in kinds} if self._measured_own else {}
        least_us = tuple(
            (slowest(0, kind), min([weight * of[1][kind] for of, weight in members]), min(own_us.get(kind, (0.0,))))
            for kind in kinds
        )
        return RankTime(layer_us + self._sums_us(len(ranks)), head_us, least_us, sum(map(max, own_us.values())))

    def healthy_us(self, members: int) -> float:
        """F + B of a layer and mean micro-batch on so many healthy members of the reference's class, their sums too."""
        return sum(self._healthy((self._costs.cost.device_class, members))[0].values()) + self._sums_us(members)

    def speed_in(self, rank: int, members: int) -> float:
        """The rank's speed as one of so many members, over a healthy one of the reference's class."""
        healthy_us = sum(self._healthy((self._costs.cost.device_class, members))[0].values())
        return healthy_us / self._layer_us(rank, members)

    def _of_rank(self, rank: int, members: int) -> KindTimes:
        """On one of so many members with equal parts."""
        if (rank, members) not in self._rank_us:
            layer_us, head_us = self._healthy(self._costs.cost.place_of(rank, members))
            if rank in self._speeds:
                speed = {kind: speed_of(self._speeds, rank, kind) for kind in layer_us}
                layer_us, head_us = ({kind: us / speed[kind] for kind, us in of.items()} for of in (layer_us, head_us))
            self._rank_us[rank, members] = layer_us, head_us
        return self._rank_us[rank, members]

    def _layer_us(self, rank: int, members: int) -> float:
        """A layer there."""
        if (rank, members) not in self._each_us:
            self._each_us[rank, members] = sum(self._of_rank(rank, members)[0].values())
        return self._each_us[rank, members]

    def _own_us(self, ranks: Group, kind: str) -> list[float]:
        """What a chunk takes each of them by itself."""
        cost, members = self._costs.cost, len(ranks)
        own_us = [cost.costs_at(cost.place_of(rank, members))[kind].own_us for rank in ranks]
        return [us / speed_of(self._speeds, rank, kind) for us, rank in zip(own_us, ranks, strict=True)]

    def _healthy(self, place: tuple[str, int]) -> KindTimes:
        if place not in self._healthy_us:
            layer_us, head_us = ({kind: float(us.mean()) for kind, us in costs.items()} for costs in self._costs.at(place))
            self._healthy_us[place] = layer_us, head_us
        return self._healthy_us[place]

    def _sums_us(self, members: int) -> float:
        """What the sums of a layer take, in the mean."""
        if members not in self._summed_us:
            cost, tokens = self._costs.cost, float(self._costs.tokens.mean())
            of = cost.layer_sums or blocks(3)[1:2]
            sums = sum(sums_in(kind, 0, len(of), of) for kind in cost.chunks) / len(of)
            self._summed_us[members] = sums * steps_of_sum(members) * (cost.sum_us + cost.sum_token_us * tokens / members)
        return self._summed_us[members]


def layer_parts(stages: Sequence[RankTime]) -> list[tuple[float, float]]:
    """What `share_out` needs: chunks by themselves, and the last stage also has the output head."""
    parts = [(time.own_us, time.layer_us) for time in stages]
    return [*parts[:-1], (stages[-1].own_us + stages[-1].head_us, stages[-1].layer_us)]


def cut_by_times(ranks: Group, times: Sequence[float], units: int) -> Crew:
    """The group in which the member that needs most time needs least, when a whole layer takes member i `times[i]`; `units`: in
    how many a layer can be cut. Raises `PlanError`.

    >>> cut_by_times((4, 5), [1.0, 2.0], 12).shares
    (8, 4)
    """
    if len(ranks) == 1:
        return Crew(ranks)
    if units < len(ranks):
        raise PlanError(f"{len(ranks)} ranks are no tensor-parallel group where a layer has {units} units to cut")
    if max(times) == min(times) and units % len(ranks) == 0:
        return Crew(ranks)
    return Crew(ranks, _shares(units, tuple(times)))


@lru_cache(maxsize=4096)
def _shares(units: int, times: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(share_out(units, [(0.0, time) for time in times]))


def crew_in(plan: Plan, ranks: Group) -> Crew:
    """The crew as `plan` has it."""
    return Crew(ranks, _shares_as(tuple(plan.role_of[rank].part for rank in ranks)))


@lru_cache(maxsize=4096)
def _shares_as(parts: tuple[Part | None, ...]) -> tuple[int, ...]:
    """Members' shares, in any unit; () = the same."""
    both = [*map(ends_of, parts)]
    unit = lcm(*(end.denominator for ends in both for end in ends))
    shares = tuple(int((high - low) * unit) for low, high in both)
    return () if len(set(shares)) == 1 else shares


def shares_of(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per replica and stage what each member has of a layer, in any unit; () where all stages are single ranks."""
    if all(len(group) == 1 for pipeline in layout.pipelines for group in pipeline.groups):
        return ()
    return tuple(
        tuple(
            shares or (1,) * len(group)
            for group, shares in zip(pipeline.groups, pipeline.shares or ((),) * len(pipeline.groups), strict=True)
        )
        for pipeline in layout.pipelines
    )
