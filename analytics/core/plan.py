"""The plan: who holds which layers, and which route each micro-batch takes.

A plan is immutable, numbered (`plan_version`) and hashed (`digest`). One model serves uniform stages, per-replica partitions,
ReCycle's rerouting, Malleus and AdaPtis:

* a `Role` states that a rank holds a range of layers, as stage `stage` of replica `replica`;
* a `Route` gives one micro-batch its hops; a hop is a layer range and the ranks (one, or a TP group) that execute it;
* a plan is legal iff each route's hops cover every layer once, in order, and each executor holds the hop's layers: all of each
  where it is alone, its part as a member of a tensor-parallel group (shards/parts.py), in which it executes everything.

Layer 0 includes the embedding, the last layer the final norm and the output head: nothing else has parameters. Ranks and
micro-batches are numbered from 0; layer ranges are ``[first_layer, first_layer + n_layers)``.

>>> from unskew.analytics.core.layout import uniform_plan
>>> plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=2)
>>> [(role.rank, role.first_layer, role.n_layers) for role in plan.roles]
[(0, 0, 2), (1, 2, 2)]
>>> plan.holders(3)
(1,)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import msgspec

from unskew.analytics.core.division import Division
from unskew.analytics.shards.parts import WHOLE, Part, Piece, make_whole, pieces_of
from unskew.collector.decoding import complaint
from unskew.collector.events import CHUNK_KINDS, ChunkKind

T = TypeVar("T")


class PlanError(ValueError):
    """An illegal plan or layout; the message is one sentence: what is wrong, what is allowed."""


class Role(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's place: it holds ``[first_layer, first_layer + n_layers)`` as `stage` of `replica`.

    `more` are further ranges ``(first_layer, n_layers)``, ascending and with gaps between, where a pipeline passes a rank more
    than once (interleaved 1F1B, ZB-V). `part`: what it holds of each of its layers as shard `shard` of a tensor-parallel group;
    None = all of it. `recompute`: of what it executes it keeps what layers were given alone, and executes each layer's forward
    once more within the backward pass. `sequence_parallel`: between what is cut of its layers the members of its group have
    some of the tokens each, instead of all.
    """

    rank: int
    replica: int
    stage: int
    first_layer: int
    n_layers: int
    shard: int = 0
    more: tuple[tuple[int, int], ...] = ()
    part: Part | None = None
    recompute: bool = False
    sequence_parallel: bool = False

    @property
    def end_layer(self) -> int:
        """End of the first range."""
        return self.first_layer + self.n_layers

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """All ranges ``(first_layer, n_layers)``, ascending."""
        return ((self.first_layer, self.n_layers), *self.more)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers held, ascending."""
        return tuple(layer for first, count in self.ranges for layer in range(first, first + count))

    def holds(self, first_layer: int, n_layers: int) -> bool:
        return any(first <= first_layer and first_layer + n_layers <= first + count for first, count in self.ranges)

    def reach(self, layer: int) -> int:
        """End of the range that `layer` lies in; `layer` itself when it is not held."""
        return next((first + count for first, count in self.ranges if first <= layer < first + count), layer)


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One leg of a route: `ranks` execute the layer range (one rank, or the members of a TP group)."""

    first_layer: int
    n_layers: int
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The executor, or the first of the TP group, which stands for it wherever one rank is named."""
        return self.ranks[0]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one micro-batch; `replica` is its home, which bounds how many of its kind are in flight."""

    micro_batch: int
    replica: int
    hops: tuple[Hop, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Who holds what and who executes what. `routes[m].micro_batch == m`.

    `orders` is the searched order of a plan that does not leave it to its schedule's rule: per role (in the order of `roles`)
    its actions as "2F0" = hop 2, forward, micro-batch 0 (notation.py). `division`: of a training that is not ours, who is given
    which samples; None = as its loader has it. For list scheduling, per role: `paces`, how long a layer takes there, in any
    unit (() = everywhere alike), and `in_flight`, how many micro-batches may be begun and not ended (() = as 1F1B has it).
    `layer_weights`: what each layer costs, 1 in the mean; () = all the same.
    """

    plan_version: int = msgspec.field(name="epoch")
    n_layers: int
    schedule: str
    roles: tuple[Role, ...]
    routes: tuple[Route, ...]
    orders: tuple[tuple[str, ...], ...] = ()
    division: Division | None = None
    paces: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    layer_weights: tuple[float, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Hash of everything but the number: two plans with one digest do the same thing."""
        rarer = (self.orders, self.division, self.paces, self.in_flight, self.layer_weights)
        facts = (self.n_layers, self.schedule, self.roles, self.routes, *(fact for fact in rarer if fact))
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with a role, ascending."""
        return tuple(sorted(role.rank for role in self.roles))

    @cached_property
    def role_of(self) -> dict[int, Role]:
        return {role.rank: role for role in self.roles}

    @cached_property
    def executors(self) -> frozenset[int]:
        """Ranks that execute something; a rank with a role may have none: then it is a spare copy of its layers."""
        return frozenset(self.executed)

    @cached_property
    def executed(self) -> Counter[int]:
        """rank -> micro-batches of which it executes something."""
        return Counter(rank for route in self.routes for rank in {rank for hop in route.hops for rank in hop.ranks})

    def holders(self, layer: int) -> tuple[int, ...]:
        """Ranks that hold `layer` or a part of it, ascending."""
        return tuple(sorted(self.parts_of(layer)))

    def parts_of(self, layer: int) -> dict[int, Part | None]:
        """Rank -> what it holds of `layer`; those that hold nothing of it are absent."""
        return {role.rank: role.part for role in self.roles if role.holds(layer, 1)}

    @cached_property
    def gradient_groups(self) -> tuple[tuple[tuple[int, ...], tuple[Piece, ...]], ...]:
        """``((ranks, pieces that they hold alike), ...)`` in the order of the first layer: every rank reduces in this order, so
        none deadlocks."""
        pieces_by: dict[tuple[int, ...], list[Piece]] = {}
        for layer in range(self.n_layers):
            for piece, ranks in pieces_of(layer, self.parts_of(layer)):
                pieces_by.setdefault(ranks, []).append(piece)
        return tuple((ranks, tuple(pieces)) for ranks, pieces in pieces_by.items())

    @cached_property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The TP groups that execute something, in the order in which micro-batches pass them; ranks alone are none."""
        paths = {id(route.hops): route.hops for route in self.routes}  # a layout's routes share them
        return tuple(dict.fromkeys(hop.ranks for hops in paths.values() for hop in hops if len(hop.ranks) > 1))

    @cached_property
    def team_of(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the TP group in which it executes, itself in it; ranks that execute alone, or nothing, are absent."""
        return {rank: ranks for ranks in self.teams for rank in ranks}

    @cached_property
    def widest(self) -> int:
        """How many members the largest TP group has; 1 = nobody executes with others."""
        return max(map(len, self.teams), default=1)

    def members_at(self, micro_batch: int, layer: int) -> tuple[int, ...]:
        """The ranks that execute `layer` of this micro-batch, together."""
        hops = self.routes[micro_batch].hops
        return next(hop.ranks for hop in hops if hop.first_layer <= layer < hop.first_layer + hop.n_layers)

    def work_of(self, first_layer: int, n_layers: int) -> float:
        """How many average layers this range costs."""
        if not self.layer_weights:
            return n_layers
        return self._work_before[first_layer + n_layers] - self._work_before[first_layer]

    @cached_property
    def _work_before(self) -> tuple[float, ...]:
        return tuple(accumulate(self.layer_weights, initial=0.0))

    @cached_property
    def weight_of(self) -> dict[int, float]:
        """Rank -> its part of its TP group's work over what an even part would be; ranks that execute alone are absent."""
        parts = {rank: self.role_of[rank].part or WHOLE for rank in self.team_of}
        return {rank: (part.end - part.first) * len(self.team_of[rank]) / part.of for rank, part in parts.items()}

    def recomputes(self, rank: int, kind: str) -> bool:
        """Whether a chunk of this kind executes the forward once more there."""
        return kind == "B" and self.role_of[rank].recompute

    def recomputing(self, ranks: Collection[int], sequence_parallel: Collection[int] = ()) -> Plan:
        """The same plan where these ranks recompute, and those are sequence-parallel, and no others."""
        modes = [(role.rank in ranks, role.rank in sequence_parallel) for role in self.roles]
        if all((role.recompute, role.sequence_parallel) == mode for role, mode in zip(self.roles, modes, strict=True)):
            return self
        roles = tuple(
            msgspec.structs.replace(role, recompute=again, sequence_parallel=by_tokens)
            for role, (again, by_tokens) in zip(self.roles, modes, strict=True)
        )
        return msgspec.structs.replace(self, roles=roles)

    def token_parts(self, rank: int) -> int:
        """Among how many members the tokens are divided there, between what is cut; 1 = it has all of them."""
        return len(self.team_of.get(rank, (rank,))) if self.role_of[rank].sequence_parallel else 1

    def renumbered(self, plan_version: int) -> Plan:
        """The same plan under another number."""
        return msgspec.structs.replace(self, plan_version=plan_version)

    def to_data(self) -> dict[str, object]:
        """Plain data for an event."""
        data: dict[str, object] = msgspec.to_builtins(self)
        if self.division is None:
            del data["division"]
        for rare in ("paces", "in_flight", "layer_weights"):
            if not data[rare]:
                del data[rare]
        return data

    @staticmethod
    def from_data(data: object) -> Plan:
        """The inverse of `to_data`; raises `PlanError` when the data is not a legal plan."""
        try:
            plan = msgspec.convert(data, Plan)
        except msgspec.ValidationError as error:
            raise PlanError(f"not a plan: {complaint(error)}") from error
        validate(plan)
        return plan


def validate(plan: Plan) -> None:
    """Raise `PlanError` unless every route covers every layer once, in order, by ranks that hold what they execute."""
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule {plan.schedule} is not known, allowed: {', '.join(SCHEDULES)}")
    role_of = {role.rank: role for role in plan.roles}
    if len(role_of) != len(plan.roles):
        raise PlanError("a rank has two roles in one plan")
    for role in plan.roles:
        free = 0
        for first, count in role.ranges:
            if count < 1 or first < free or first + count > plan.n_layers:
                raise PlanError(f"rank {role.rank} holds layers {first}..{first + count - 1} of {plan.n_layers}")
            free = first + count + 1  # neighbouring ranges are one range
    groups: set[tuple[int, ...]] = set()
    seen: set[int] = set()
    for number, route in enumerate(plan.routes):
        if route.micro_batch != number:
            raise PlanError(f"route {number} is for micro-batch {route.micro_batch}")
        if id(route.hops) not in seen:  # a layout's routes share them
            seen.add(id(route.hops))
            groups.update(hop.ranks for hop in route.hops)
            _validate_route(route, plan.n_layers, role_of)
    _validate_groups(groups, role_of)


def _validate_groups(groups: Iterable[tuple[int, ...]], role_of: Mapping[int, Role]) -> None:
    """What executes together is a whole layer, and nobody executes in two groups: their order could wait for itself."""
    group_of: dict[int, tuple[int, ...]] = {}
    for ranks in sorted(groups):
        if not make_whole(role_of[rank].part for rank in ranks):
            parts = ", ".join(f"rank {rank} has {role_of[rank].part or 'all'}" for rank in ranks)
            raise PlanError(f"ranks that execute together must make up a layer, in the order of their shards: {parts}")
        if len({role_of[rank].recompute for rank in ranks}) > 1:
            raise PlanError(f"of ranks that execute together, {', '.join(map(str, ranks))}, all recompute or none")
        if len({role_of[rank].sequence_parallel for rank in ranks}) > 1:
            raise PlanError(f"of ranks that execute together, {', '.join(map(str, ranks))}, all are sequence-parallel or none")
        for rank in ranks:
            if group_of.setdefault(rank, ranks) != ranks:
                names = " and ".join("-".join(map(str, group)) for group in (group_of[rank], ranks))
                raise PlanError(f"rank {rank} executes in two tensor-parallel groups, {names}: it may in one")


def _validate_route(route: Route, n_layers: int, role_of: Mapping[int, Role]) -> None:
    number, expected = route.micro_batch, 0
    for hop in route.hops:
        if hop.first_layer != expected or hop.n_layers < 1:
            raise PlanError(f"the route of micro-batch {number} has layer {hop.first_layer} where {expected} is due")
        if not hop.ranks:
            raise PlanError(f"nobody executes layer {hop.first_layer} of micro-batch {number}")
        for rank in hop.ranks:
            if rank not in role_of or not role_of[rank].holds(hop.first_layer, hop.n_layers):
                raise PlanError(f"rank {rank} does not hold the layers it executes for micro-batch {number}")
        expected = hop.first_layer + hop.n_layers
    if expected != n_layers:
        raise PlanError(f"the route of micro-batch {number} ends at layer {expected} of {n_layers}")


def split_evenly(total: int, parts: int) -> list[int]:
    """`total` in `parts` shares that differ by at most one, larger in the middle (the ends also hold embedding and head)."""
    base, extra = divmod(total, parts)
    start = (parts - extra) // 2
    return [base + (start <= part < start + extra) for part in range(parts)]


PASSES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""Schedule -> how often a micro-batch passes each rank in the plan a run starts with."""

SCHEDULES = (*PASSES, "searched")


def ruled(schedule: str) -> str:
    """The schedule by whose rule a plan is ordered that has no `orders`: "searched" is a plan's own order and no rule."""
    return "zb-h1" if schedule == "searched" else schedule


def splits_backward(schedule: str) -> bool:
    """Whether B is the gradient of activations alone and W, the gradient of weights, an action of its own."""
    return schedule in ("zb-h1", "zb-v", "searched")


def chunk_kinds(schedule: str) -> tuple[ChunkKind, ...]:
    """The kinds of chunks that a schedule has."""
    return CHUNK_KINDS if splits_backward(schedule) else CHUNK_KINDS[:2]


def stage_order_of(schedule: str, ranks: Sequence[T]) -> list[T]:
    """The order in which a micro-batch passes the ranks of a pipeline: once, in a loop (interleaved), or there and back (ZB-V).

    >>> stage_order_of("zb-v", [0, 1, 2])
    [0, 1, 2, 2, 1, 0]
    """
    if schedule not in PASSES:
        raise PlanError(f"schedule {schedule} is not known, allowed: {', '.join(PASSES)}")
    if schedule == "zb-v":
        return [*ranks, *reversed(ranks)]
    return list(ranks) * PASSES[schedule]
