"""What a rank has in memory on the way from one plan to the next.

A copy that the next plan moves away, or of which it asks for another part, is kept without its gradient until an iteration of
that plan is committed. What moves is packed into flat tensors, of which a rank has at most `MOST_MOVING` at once
(runtime/rank/migrate.py). Gradients of an iteration that broke are there as well; so they are counted for every change.

>>> from unskew.analytics.core.layout import plan_from_partition
>>> before, after = (
...     plan_from_partition(
...         plan_version=0, n_layers=4, schedule="1f1b", members=[[0, 1]], layers=[layers], micro_batches=[2]
...     )
...     for layers in ([2, 2], [3, 1])
... )
>>> handed_over(before, after, [10.0] * 4)
{0: TransitBytes(kept=0.0, at_once=140.0), 1: TransitBytes(kept=30.0, at_once=100.0)}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from unskew.analytics.core.plan import Plan, Role
from unskew.analytics.shards.parts import common, size_of

KEPT_WITH_GRADIENT = 3
"""A parameter and both moments take as much each as its gradient."""
MOST_MOVING = 2
"""Flat tensors of a rank at once: one on its way, the next one being packed."""


class TransitBytes(msgspec.Struct, frozen=True):
    """Bytes of a rank: what is `kept` beside what the next plan takes, and all that is there `at_once` while layers move."""

    kept: float
    at_once: float


def handed_over(before: Plan, after: Plan, gradient_bytes: Sequence[float]) -> dict[int, TransitBytes]:
    """Of each rank of `after`. Who gives what is decided later, by what is really held: each is taken to give as much of what
    others lack as it has."""
    old, new = ({role.rank: (role, {*role.layers}) for role in plan.roles} for plan in (before, after))
    lacks = {rank: _lacks(role, *old.get(rank, (role, set[int]()))) for rank, (role, _) in new.items()}
    wanted: dict[int, float] = {}
    for lacking in lacks.values():
        for layer, share in lacking.items():
            wanted[layer] = max(share, wanted.get(layer, 0.0))
    found = {}
    for rank, (role, layers) in new.items():
        was, had = old.get(rank, (role, set[int]()))
        stays, share = had & layers if was.part == role.part else set[int](), size_of(was.part)

        def bytes_of(numbers: Iterable[int], share: float) -> float:
            return share * sum(gradient_bytes[number] for number in numbers)

        moves = [lacking * gradient_bytes[layer] for layer, lacking in lacks[rank].items()]
        moves += [min(share, wanted[layer]) * gradient_bytes[layer] for layer in had & wanted.keys()]
        state = bytes_of(had, share) + bytes_of(layers - stays, size_of(role.part)) + sum(sorted(moves)[-MOST_MOVING:])
        kept = KEPT_WITH_GRADIENT * bytes_of(had - stays, share)
        found[rank] = TransitBytes(kept, KEPT_WITH_GRADIENT * state + bytes_of(stays, share))
    return found


def _lacks(role: Role, was: Role, had: set[int]) -> dict[int, float]:
    """Layer -> how much of it the rank lacks."""
    whole, there = size_of(role.part), common(0, role.part, was.part)
    rest = 0.0 if role.part == was.part else max(whole - float(there.high - there.low), 0.0)
    lacking = {layer: rest if layer in had else whole for layer in role.layers}
    return {layer: share for layer, share in lacking.items() if share > 0}
