"""What a chunk, a message and an iteration's end cost: one cost model for predictor, detector, scheduler and sleeping device.

A chunk of `n` layers takes ``(own + n * (a + b * tokens + c * sum_sq)) / speed`` microseconds, plus, where it includes the
output head, ``head * tokens / speed``; a B that recomputes takes what an F and a B take, at its speed for B. The coefficients
are per kind of work (F, B, W), device class and TP degree, and hold for a healthy device (speed 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from math import log

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.shards.together import LayerSums, blocks

Speeds = Mapping[int, Mapping[str, float]]
"""rank -> kind of work -> speed; a missing rank or kind is healthy (1.0)."""

HEALTHY: Speeds = {}


def speed_of(speeds: Speeds, rank: int, kind: str) -> float:
    """The speed of a rank for one kind of work; 1.0 when nothing is known against it."""
    return speeds.get(rank, {}).get(kind, 1.0)


@lru_cache(maxsize=256)
def _chain(groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> int:
    """The longest chain of gradient groups of which each shares a rank with the one before."""
    behind: dict[int, int] = {}
    for ranks, _ in groups:
        if len(ranks) > 1:
            place = 1 + max(behind.get(rank, 0) for rank in ranks)
            behind.update(dict.fromkeys(ranks, place))
    return max(behind.values(), default=0)


class ChunkCost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Coefficients of one kind of work, per layer: us, us/token, us/token^2; `head_us_per_token` for the output head; `own_us`:
    what a chunk takes by itself, however many layers it has."""

    layer_us: float
    token_us: float
    token2_us: float
    head_us_per_token: float = 0.0
    own_us: float = 0.0

    def us(self, work: Work, n_layers: float, has_head: bool) -> float:
        """Microseconds of a chunk of `n_layers` on a healthy device."""
        per_layer = self.layer_us + self.token_us * work.tokens + self.token2_us * work.sum_sq
        return self.own_us + n_layers * per_layer + (self.head_us_per_token * work.tokens if has_head else 0.0)

    def times(self, factor: float) -> ChunkCost:
        """`factor` times as much."""
        return ChunkCost(**{field: factor * getattr(self, field) for field in self.__struct_fields__})


Costs = dict[str, ChunkCost]
"""kind of work -> what it costs."""

Place = tuple[str, int]
"""(device class, TP degree): chunks that have both in common share their coefficients."""


class PlaceCost(msgspec.Struct, frozen=True, kw_only=True):
    """What chunks cost on devices of class `device_class` in TP groups of `tp` members."""

    device_class: str
    tp: int
    chunks: Costs


class SlowLink(msgspec.Struct, frozen=True, gc=False):
    """A message from `sender` to `receiver` takes `more_us` longer than over other links."""

    sender: int
    receiver: int
    more_us: float


class GradientSync(msgspec.Struct, frozen=True, kw_only=True):
    """What the sum of gradients over the replicas costs where links do: a step takes `step_us`, and `byte_us` more for each
    byte that it carries. `layer_bytes`: the gradients of each layer, in buckets of `bucket_bytes` (pipeline/gradient_sync.py).
    """

    layer_bytes: tuple[int, ...]
    bucket_bytes: int
    step_us: float = 0.0
    byte_us: float = 0.0


class CostModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Chunk costs per kind, what a message between ranks costs, and the end of an iteration (gradients, vote, optimiser).

    A message is on its way for `message_us`, more over `slow_links`, once it has occupied its link for `message_token_us` per
    token of its micro-batch that it carries; where sends are `blocking`, its sender does nothing else until it has arrived
    (pipeline/dag.py). What tensor-parallel groups exchange takes `sum_us` for each step, and `sum_token_us` more for each token
    that one carries (shards/together.py); `layer_sums`: how many sums each layer has, () = as blocks.

    `chunks` are those of the reference: devices of class `device_class` in TP groups of `tp` members. `others` holds the same
    kinds of work for the other classes and degrees; `classes` lists which ranks are of which class (in none: the reference's).
    `cores`: those that the ranks share, where they are more (pipeline/shared_cores.py); of its time in chunks a rank is without
    one for the part `idle` (0 to 1; absent = it works all the time).
    `iteration_end_us` is that of a plan whose gradient collectives all run at once; see `end_us`. `end_more_us`: (size of the
    largest tensor-parallel group, by how much the end is longer), as was learned under plans with such groups; absent = 0:
    what groups exchange is in part work of the hosts, which no chunk shows. `end_ranks`: so many ranks shared the `cores` when
    the end was learned, and it was the longer for it; 0 = not known. `sync`: what collectives take beside the backward pass;
    None = they are no more than a part of the end.

    Without a "W" of its own, "B" is the whole backward pass; with it, the gradient of activations alone.
    `prediction_intervals`: kind of work, or "iteration" -> half-width of the 90 % prediction interval, as the log of a
    ratio (fit.py); absent = not known.
    """

    chunks: Costs
    message_us: float = 0.0
    message_token_us: float = 0.0
    sum_us: float = 0.0
    sum_token_us: float = 0.0
    layer_sums: LayerSums = ()
    blocking: bool = False
    slow_links: tuple[SlowLink, ...] = ()
    cores: int | None = None
    idle: dict[int, float] = {}
    iteration_end_us: float = 0.0
    end_more_us: tuple[tuple[int, float], ...] = ()
    end_ranks: int = 0
    collective_us: float = 0.0
    sync: GradientSync | None = None
    prediction_intervals: dict[str, float] = msgspec.field(name="bars", default_factory=dict)
    device_class: str = ""
    tp: int = 1
    others: tuple[PlaceCost, ...] = ()
    classes: dict[str, tuple[int, ...]] = {}

    @cached_property
    def class_of(self) -> dict[int, str]:
        """rank -> device class, of the ranks that `classes` names."""
        return {rank: name for name, ranks in self.classes.items() for rank in ranks}

    def place_of(self, rank: int, tp: int = 1) -> Place:
        """Where the chunks belong that `rank` executes as one of `tp` members."""
        return self.class_of.get(rank, ""), tp

    @cached_property
    def _known(self) -> dict[Place, Costs]:
        return {(self.device_class, self.tp): self.chunks, **{(one.device_class, one.tp): one.chunks for one in self.others}}

    def costs_at(self, place: Place) -> Costs:
        """Chunk costs of a device class at a TP degree.

        What was never measured is taken from the same class at the nearest degree, as if each of k members did 1/k of the
        work, but not of what a chunk takes by itself; a class that was never measured is taken for the reference's.
        """
        if (found := self._known.get(place)) is not None:
            return found
        name, tp = place
        degrees = [degree for known, degree in self._known if known == name]
        if not degrees:
            return self.costs_at((self.device_class, tp))
        nearest = min(degrees, key=lambda degree: (abs(log(degree / tp)), degree))
        known = self._known[name, nearest]
        return {kind: msgspec.structs.replace(cost.times(nearest / tp), own_us=cost.own_us) for kind, cost in known.items()}

    def sums_of(self, n_layers: int) -> LayerSums:
        """How many sums each of all layers has."""
        return self.layer_sums or blocks(n_layers)

    @cached_property
    def joined(self) -> CostModel:
        """The model for schedules that do not split the backward pass: B = gradient of activations and of weights."""
        return self._each(_joined) if "W" in self.chunks else self

    @cached_property
    def split(self) -> CostModel:
        """The model for schedules that split it. What was measured only as a whole is split by the maths: attention
        has no weights, so W has half of the linear part (one of two equal products) and nothing of the quadratic one."""
        return self if "W" in self.chunks or "B" not in self.chunks else self._each(_split)

    def _each(self, change: Callable[[Costs], Costs]) -> CostModel:
        others = tuple(msgspec.structs.replace(one, chunks=change(one.chunks)) for one in self.others)
        return msgspec.structs.replace(self, chunks=change(self.chunks), others=others)

    def end_us(self, plan: Plan) -> float:
        """The end of an iteration under `plan`: each collective that has to wait for another one adds `collective_us`.

        Ranks reduce their groups in one order, so groups that share a rank follow each other: with uneven partitions they form
        a chain from the first stage to the last (seven deep at PP4 x DP2), where equal ones run side by side. On shared cores
        ranks take turns at their ends, and so do groups that run side by side.
        """
        end_us, collective_us = self.iteration_end_us, 0.0 if self.sync is not None else self.collective_us
        if self.end_more_us:
            end_us = max(end_us + dict(self.end_more_us).get(plan.widest, 0.0), 0.0)
        groups = plan.gradient_groups if collective_us else ()
        if self.cores is None or not self.end_ranks:
            return end_us + collective_us * max(_chain(groups) - 1, 0)
        known, crowd = self._crowd(self.end_ranks), self.crowding(plan)
        in_groups = sum(len(ranks) for ranks, _ in groups if len(ranks) > 1)
        turns = max(_chain(groups), in_groups / self.cores) / known
        return max(crowd * end_us + collective_us * (turns - crowd), 0.0) if groups else crowd * end_us

    def crowding(self, plan: Plan) -> float:
        """How many times as long the ranks of `plan` take at their ends as those did of whom the end was learned."""
        return self._crowd(len(plan.ranks)) / self._crowd(self.end_ranks) if self.end_ranks else 1.0

    @property
    def least_end_us(self) -> float:
        """No plan ends its iterations in less."""
        end_us = self.iteration_end_us + min([0.0, *dict(self.end_more_us).values()])
        if self.cores is not None:
            end_us = (end_us - self.collective_us) / self._crowd(self.end_ranks)
        return max(end_us, 0.0)

    def _crowd(self, ranks: int) -> float:
        """So many of these ranks share a core."""
        return 1.0 if self.cores is None else max(ranks / self.cores, 1.0)

    def chunk_us(
        self,
        kind: str,
        work: Work,
        n_layers: float,
        *,
        has_head: bool,
        speed: float = 1.0,
        place: Place | None = None,
        again: bool = False,
    ) -> float:
        """Microseconds of one chunk at `speed`; without a `place` on the reference's devices. `again`: with the forward once
        more."""
        costs = self.chunks if place is None else self.costs_at(place)
        return sum(costs[one].us(work, n_layers, has_head) for one in (kind, *("F" if again else ""))) / speed


def _joined(chunks: Costs) -> Costs:
    b, w = chunks["B"], chunks["W"]
    whole = ChunkCost(**{field: getattr(b, field) + getattr(w, field) for field in ChunkCost.__struct_fields__})
    return {"F": chunks["F"], "B": whole}


def _split(chunks: Costs) -> Costs:
    w = msgspec.structs.replace(chunks["B"].times(0.5), token2_us=0.0)
    b = msgspec.structs.replace(w, token2_us=chunks["B"].token2_us)
    return {"F": chunks["F"], "B": b, "W": w}
