"""In-step recovery: what of an iteration's gradients goes on into its next attempt (after ReCoVer, arXiv 2605.11215).

The gradient of a layer is a sum over the iteration's micro-batches, and each copy of the layer holds a part of it: the
micro-batches that its rank executed, or all of them once its bucket was reduced. Ranks die, parts go with them; what the
survivors hold is exact as it is, because neither weights nor divisor change within an iteration. So, layer by layer:

1. if a holder has the whole sum, it counts, and holders that lack it take it over;
2. else the parts of all holders count: no micro-batch is in two of them, for each attempt adds only what was missing. Of a
   tensor-parallel group that lost a member nothing counts: what the others hold of its micro-batches is a part of a gradient;
3. what is missing then is executed in the next attempt. A micro-batch is executed forward through all layers and backward
   down to its lowest missing one; gradients of layers that have it already are not added again;
4. for that attempt alone the missing micro-batches are spread over all pipelines of the plan, as ReCoVer's extra micro-batches
   are over all survivors: a lost replica's share is not done by one pipeline while the others wait.

>>> from unskew.analytics.core.layout import uniform_plan
>>> plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=1, micro_batches=2)
>>> kept = keep(plan, {0: {0: {0: 7}}, 1: {}})
>>> kept.counts(0, 0), kept.counts(0, 1), kept.share
(False, True, 0.5)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

import msgspec

from unskew.analytics.core.plan import Hop, Plan, Route
from unskew.analytics.pipeline.actions import Action
from unskew.analytics.shards.parts import Part, Piece, ends_of, make_whole, pieces_of

Held = Mapping[int, Mapping[int, Mapping[int, int]]]
"""Rank -> layer -> micro-batch in its gradient -> the plan version under which that was computed."""


class SumTransfer(msgspec.Struct, frozen=True):
    """`target` takes the whole sum of a piece of a layer from `source`."""

    piece: Piece
    source: int
    target: int


class KeptStretch(msgspec.Struct, frozen=True):
    """Neighbouring layers that keep the same micro-batches of the same plan version."""

    first_layer: int
    n_layers: int
    plan_version: int
    micro_batches: tuple[int, ...]


class KeptGradients(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What an attempt need not execute: `of[layer]` gives each micro-batch that is kept the plan version it was computed
    under. Every holder has the whole sum of the layers in `reduced`; of all others each has its part, but for the (rank, layer)
    in `dropped`: these have sums of which something is of no use, and begin anew."""

    n_micro_batches: int
    of: tuple[Mapping[int, int], ...]
    reduced: frozenset[int] = frozenset()
    transfers: tuple[SumTransfer, ...] = ()
    dropped: frozenset[tuple[int, int]] = frozenset()

    @property
    def share(self) -> float:
        """Of all (layer, micro-batch): 1.0 = nothing is missing, 0.0 = the iteration is redone."""
        return sum(map(len, self.of)) / (len(self.of) * self.n_micro_batches)

    def counts(self, layer: int, micro_batch: int) -> bool:
        """Whether the gradient that this attempt computes is added."""
        return micro_batch not in self.of[layer]

    def misses(self, micro_batch: int) -> bool:
        """Whether some layer lacks it."""
        return self._lowest_missing[micro_batch] is not None

    def hands_back(self, micro_batch: int, first_layer: int) -> bool:
        """Whether the backward pass goes on below `first_layer`."""
        lowest = self._lowest_missing[micro_batch]
        return lowest is not None and lowest < first_layer

    def executes(self, action: Action) -> bool:
        """Whether the attempt needs this action."""
        lowest, end = self._lowest_missing[action.micro_batch], action.first_layer + action.n_layers
        if lowest is None or action.kind == "F":
            return lowest is not None
        if action.kind == "B":
            return lowest < end
        return any(self.counts(layer, action.micro_batch) for layer in range(action.first_layer, end))

    def stretches(self) -> Iterator[KeptStretch]:
        """All that is kept, as the log has it."""
        for kept, layers in groupby(range(len(self.of)), key=lambda layer: self.of[layer]):
            first, *others = layers
            for version in sorted(set(kept.values())):
                micro_batches = tuple(sorted(number for number, of in kept.items() if of == version))
                yield KeptStretch(first, 1 + len(others), version, micro_batches)

    @cached_property
    def _lowest_missing(self) -> tuple[int | None, ...]:
        """The lowest layer that lacks each micro-batch; None = every layer has it."""
        return tuple(
            next((layer for layer, kept in enumerate(self.of) if number not in kept), None)
            for number in range(self.n_micro_batches)
        )


def nothing_kept(plan: Plan) -> KeptGradients:
    """For an attempt that executes everything."""
    return KeptGradients(n_micro_batches=len(plan.routes), of=({},) * plan.n_layers)


def keep(plan: Plan, held: Held) -> KeptGradients:
    """What the next attempt, under `plan`, takes over of what its ranks hold."""
    everything = len(plan.routes)
    of, reduced, transfers, dropped = [], [], [], []
    for layer in range(plan.n_layers):
        parts = plan.parts_of(layer)
        sums = {rank: held.get(rank, {}).get(layer, {}) for rank in parts}
        whole = [rank for rank, sum_of in sums.items() if len(sum_of) == everything]
        source_of = {piece: next((rank for rank in ranks if rank in whole), None) for piece, ranks in pieces_of(layer, parts)}
        if None not in source_of.values():
            of.append(dict(sums[whole[0]]))
            reduced.append(layer)
            transfers += [
                SumTransfer(piece, source, rank)
                for piece, ranks in pieces_of(layer, parts)
                for rank in ranks
                if rank not in whole and (source := source_of[piece]) is not None
            ]
        else:
            usable = _usable(parts, sums)
            of.append({number: version for rank in usable for number, version in sums[rank].items()})
            dropped += [(rank, layer) for rank, sum_of in sums.items() if sum_of and rank not in usable]
    return KeptGradients(
        n_micro_batches=everything,
        of=tuple(of),
        reduced=frozenset(reduced),
        transfers=tuple(transfers),
        dropped=frozenset(dropped),
    )


def _usable(parts: Mapping[int, Part | None], sums: Mapping[int, Mapping[int, int]]) -> set[int]:
    """The ranks whose sums count: of each micro-batch in one of them the others have the rest of the layer, each once."""
    usable = {rank for rank, sum_of in sums.items() if sum_of}
    while True:
        having: dict[int, list[int]] = {}
        for rank in usable:
            for number in sums[rank]:
                having.setdefault(number, []).append(rank)
        broken = {
            rank
            for ranks in {tuple(sorted(ranks, key=lambda rank: ends_of(parts[rank]))) for ranks in having.values()}
            if not make_whole(parts[rank] for rank in ranks)
            for rank in ranks
        }
        if not broken:
            return usable
        usable -= broken


def spread(plan: Plan, kept: KeptGradients) -> Plan:
    """`plan` as its next attempt executes it: each missing micro-batch takes one of the paths that the plan has, the one whose
    busiest rank is then the least busy, its own where none is better. What is kept is no work.

    >>> from unskew.analytics.core.layout import uniform_plan
    >>> plan = uniform_plan(tp=1, pp=1, dp=3, n_layers=1, micro_batches=6)
    >>> kept = keep(plan, {0: {0: {0: 7, 3: 7}}, 2: {0: {2: 7, 5: 7}}})
    >>> [route.hops[0].rank for route in spread(plan, kept).routes]
    [0, 1, 2, 0, 0, 2]
    """
    if not any(kept.of):
        return plan
    paths = tuple(dict.fromkeys((route.replica, route.hops) for route in plan.routes))
    load, routes = Counter[int](), list(plan.routes)
    for number, route in enumerate(plan.routes):
        if kept.misses(number):
            own = route.replica, route.hops
            replica, hops = min((own, *paths), key=lambda path: max((load + _layers(path[1])).values()))
            load += _layers(hops)
            routes[number] = Route(micro_batch=number, replica=replica, hops=hops)
    return plan if routes == list(plan.routes) else msgspec.structs.replace(plan, routes=tuple(routes), orders=())


def _layers(hops: Sequence[Hop]) -> Counter[int]:
    """Rank -> layers that it executes."""
    layers = Counter[int]()
    for hop in hops:
        layers.update(dict.fromkeys(hop.ranks, hop.n_layers))
    return layers
