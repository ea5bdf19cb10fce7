"""The sum of gradients over the replicas, bucket by bucket beside the backward pass: which buckets, and when they are through.

A bucket has pieces of neighbouring layers that the same ranks hold. All ranks take their buckets in one order, from the last
layer to the first, as a backward pass finishes them, and one after the other: a bucket begins when each of its ranks has added
its last micro-batch to all of its layers and is through with the bucket before. So that the first need not wait for the end of
a rank's last chunk, that chunk is executed in parts, which end where buckets do; members of a tensor-parallel group make the
same parts. Where the backward pass is split, several chunks are left at a rank's end that no other rank waits for: their parts
are executed layer by layer, those of all micro-batches, so that layers are closed from the beginning of this time on. The ranks
execute this (runtime/rank/gradients.py), emulated devices take its time, and the predictor prices it by the same rules.

>>> from unskew.analytics.core.layout import uniform_plan
>>> plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=2)
>>> buckets = buckets_of(plan, [10] * 4, 20)
>>> [(bucket.ranks, bucket.layers) for bucket in buckets]
[((0, 1), (2, 3)), ((0, 1), (0, 1))]
>>> through(buckets, [{0: 5.0, 1: 7.0}, {0: 9.0, 1: 9.0}], lambda bucket: 4.0)
[(7.0, 11.0), (11.0, 15.0)]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from unskew.analytics.core.cost import GradientSync
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.actions import Action
from unskew.analytics.shards.parts import Piece
from unskew.analytics.shards.together import steps_of_sum
from unskew.collector.events import ChunkKind

MOST_IN_FLIGHT = 4
"""Buckets that a rank sums at once: each is reduced in a copy."""


class Bucket(msgspec.Struct, frozen=True, dict=True):
    """`pieces` that `ranks` hold alike, from the last layer to the first; `n_bytes` of gradients."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    n_bytes: float

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({piece.layer for piece in self.pieces}))


class ActionStep(msgspec.Struct, frozen=True, gc=False):
    """An action, or a part of it: an action of these layers alone. `closes`: those of them to which this rank adds nothing
    more."""

    action: Action
    closes: tuple[int, ...] = ()


def buckets_of(
    plan: Plan, layer_bytes: Sequence[float], bucket_bytes: float, reduced: Collection[int] = ()
) -> tuple[Bucket, ...]:
    """The buckets of all ranks in their order, but for the layers that are `reduced`: each is at least so large, if its group
    has so much left; `layer_bytes`: of each whole layer."""
    found = []
    for ranks, pieces in plan.gradient_groups:
        bucket, size = list[Piece](), 0.0
        for piece in reversed(pieces) if len(ranks) > 1 else ():
            if piece.layer in reduced:
                continue
            bucket.append(piece)
            size += float(piece.high - piece.low) * layer_bytes[piece.layer]
            if size >= bucket_bytes:
                found.append(Bucket(ranks, tuple(bucket), size))
                bucket, size = [], 0.0
        if bucket:
            found.append(Bucket(ranks, tuple(bucket), size))
    return tuple(sorted(found, key=lambda bucket: (-bucket.layers[0], bucket.ranks)))


def last_steps(
    actions: Sequence[Action], plan: Plan, buckets: Iterable[Bucket], rank: int
) -> dict[int, tuple[ActionStep, ...]]:
    """Number of one of a rank's `actions` -> what is executed in its turn, where that is not just the action: in parts, or,
    where some are executed together at the end, all of these for the first and nothing for the others."""
    members = plan.team_of.get(rank, (rank,))
    pauses = {bucket.layers[0] for bucket in buckets if not set(members).isdisjoint(bucket.ranks)}
    ending: ChunkKind = "W" if any(action.kind == "W" for action in actions) else "B"
    alone = _before_the_end(actions) if ending == "W" else len(actions)
    closed: set[int] = set()
    found: dict[int, tuple[ActionStep, ...]] = dict.fromkeys(range(alone + 1, len(actions)), ())
    for number in range(min(alone, len(actions) - 1), -1, -1):
        turn = actions[alone:] if number == alone else actions[number : number + 1]
        if any(action.kind == ending and not closed.issuperset(_layers(action)) for action in turn):
            parts = sorted((part for action in turn for part in _parts(action, pauses)), key=lambda one: -one.first_layer)
            found[number] = _closing(parts, ending, closed)
    return found


def _closing(parts: Sequence[Action], ending: ChunkKind, closed: set[int]) -> tuple[ActionStep, ...]:
    """The parts, and which layers each closes that is not `closed` later; these are then."""
    steps = []
    for part in reversed(parts):
        closes = tuple(layer for layer in _layers(part) if part.kind == ending and layer not in closed)
        closed.update(closes)
        steps.append(ActionStep(part, closes))
    return tuple(reversed(steps))


def _before_the_end(actions: Sequence[Action]) -> int:
    """How many actions come before those that no other rank waits for and that wait for none: the last W, and the first stage's
    last B where it comes before all of them also by its layers, for it waits for its input."""
    number = len(actions)
    while number and actions[number - 1].kind == "W":
        number -= 1
    return number - (number > 0 and actions[number - 1].kind == "B" and not any(action.hop for action in actions[number - 1 :]))


def _layers(action: Action) -> range:
    return range(action.first_layer, action.first_layer + action.n_layers)


def _parts(action: Action, pauses: Collection[int]) -> Iterator[Action]:
    """The last layers first."""
    end = action.first_layer + action.n_layers
    for layer in reversed(_layers(action)):
        if layer in pauses or layer == action.first_layer:
            yield msgspec.structs.replace(action, first_layer=layer, n_layers=end - layer)
            end = layer


def bucket_us(sync: GradientSync, bucket: Bucket) -> float:
    """What the sum of a bucket takes from the moment all its ranks have come: as a ring (shards/together.py)."""
    members = len(bucket.ranks)
    return steps_of_sum(members) * (sync.step_us + sync.byte_us * bucket.n_bytes / members)


def through(
    buckets: Sequence[Bucket], ready: Sequence[Mapping[int, Any]], price: Callable[[Bucket], float]
) -> list[tuple[Any, Any]]:
    """(when its sum begins, when it is through) for each bucket, `ready[b]` saying when each rank has all of bucket b: numbers,
    or arrays of one shape."""
    free: dict[int, Any] = {}
    found = []
    for bucket, of in zip(buckets, ready, strict=True):
        begins = 0.0
        for rank in bucket.ranks:
            begins = np.maximum(begins, np.maximum(of[rank], free.get(rank, 0.0)))
        begins = begins if np.ndim(begins) else float(begins)
        ends = begins + price(bucket)
        free.update(dict.fromkeys(bucket.ranks, ends))
        found.append((begins, ends))
    return found
