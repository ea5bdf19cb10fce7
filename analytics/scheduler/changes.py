"""What a change of plan moves, and its description in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from unskew.analytics.core.division import Division
from unskew.analytics.core.plan import Plan, Role
from unskew.analytics.shards.parts import ZERO, Part, ends_of, size_of

Ranges = tuple[tuple[int, int], ...]
"""``(first_layer, n_layers)``, as a role has them."""


def moved_layers(old: Plan, new: Plan) -> tuple[tuple[int, float], ...]:
    """(layer, how much of it) that a rank must receive before `new` can run, one entry per (rank, layer) of which it does not
    hold all that it needs under `old`."""
    moved = list[tuple[int, float]]()
    for role in new.roles:
        before = old.role_of.get(role.rank)
        if before is None:
            moved += _lacking(role.ranges, role.part)
        elif before is not role:
            moved += _lacking(role.ranges, role.part, before.ranges, before.part)
    return tuple(moved)


@lru_cache(maxsize=8192)
def _lacking(ranges: Ranges, part: Part | None, held: Ranges = (), of: Part | None = None) -> tuple[tuple[int, float], ...]:
    """What a rank that holds its part `of` the layers in some ranges lacks of its `part` of others: the same for many ranks,
    and in most of the plans that are tried."""
    layers, known = _layers(ranges), {*_layers(held)}
    lacking = [(layer, size_of(part)) for layer in layers if layer not in known]
    if held and of != part:
        (low, high), (first, end) = ends_of(part), ends_of(of)
        more = float(high - low - max(min(high, end) - max(low, first), ZERO))
        lacking += [(layer, more) for layer in layers if layer in known and more > 0.0]
    return tuple(lacking)


def _layers(ranges: Ranges) -> list[int]:
    return [layer for first, count in ranges for layer in range(first, first + count)]


def alike(old: Plan, new: Plan) -> bool:
    """Whether they do the same thing, as their digests say too, which take longer to make."""
    return all(getattr(old, fact) == getattr(new, fact) for fact in Plan.__struct_fields__ if fact != "plan_version")


def describe(old: Plan, new: Plan) -> str:
    """The change in a sentence for people: "rank 3: 4 -> 2 layers; replica 0: 8 -> 7 micro-batches"."""
    parts = []
    for rank in sorted({*old.ranks, *new.ranks}):
        before, after = old.role_of.get(rank), new.role_of.get(rank)
        if after is None:
            parts.append(f"rank {rank}: leaves")
        elif before is None:
            parts.append(f"rank {rank}: joins with {len(after.layers)} layers")
        elif len(before.layers) != len(after.layers):
            parts.append(f"rank {rank}: {len(before.layers)} -> {len(after.layers)} layers")
        elif before.layers != after.layers:
            parts.append(f"rank {rank}: layers {_range(before)} -> {_range(after)}")
        parts += [f"rank {rank}: {kept}" for kept in _keeping(before, after)]
        if before is not None and after is not None and before.part != after.part:
            parts.append(f"rank {rank}: {_share(before)} -> {_share(after)} of each layer")
    if new.division is not None:
        parts += _divided(old.division, new.division)
    before_counts, after_counts = _homes(old), _homes(new)
    for replica in sorted(before_counts.keys() | after_counts.keys()) if new.division is None else ():
        if before_counts[replica] != after_counts[replica]:
            parts.append(f"replica {replica}: {before_counts[replica]} -> {after_counts[replica]} micro-batches")
    before_guests, after_guests = _guests(old), _guests(new)
    for rank in new.ranks:
        if before_guests[rank] != after_guests[rank]:
            parts.append(f"rank {rank}: {before_guests[rank]} -> {after_guests[rank]} rerouted micro-batches")
    return "; ".join(parts) or "no change"


def _divided(old: Division | None, new: Division) -> list[str]:
    """What of the samples changes; the first division says all of it."""
    before = old.samples if old is not None else ()
    parts = [
        f"rank {rank}: {f'{before[rank]} -> ' if before else ''}{count} samples"
        for rank, count in enumerate(new.samples)
        if not before or (before[rank] != count and count)
    ]
    if (0 if old is None else old.window) != new.window:
        parts.append(f"lengths balanced over {new.window} global batches" if new.window else "lengths balanced no more")
    return parts


def _share(role: Role) -> str:
    low, high = ends_of(role.part)
    return "all" if role.part is None else str(high - low)


def _keeping(before: Role | None, after: Role | None) -> Iterator[str]:
    """How a rank saves memory where it did not, and how it does no more."""
    if after is None:
        return
    if after.recompute != (before is not None and before.recompute):
        yield "recomputes its forward passes" if after.recompute else "recomputes no more"
    if after.sequence_parallel != (before is not None and before.sequence_parallel):
        yield "is sequence-parallel" if after.sequence_parallel else "is sequence-parallel no more"


def _range(role: Role) -> str:
    return " and ".join(f"{first}..{first + count - 1}" for first, count in role.ranges)


def _homes(plan: Plan) -> Counter[int]:
    """Micro-batches per replica."""
    return Counter(route.replica for route in plan.routes)


def _guests(plan: Plan) -> Counter[int]:
    """Micro-batches of other replicas that each rank executes."""
    hops = ((route, hop) for route in plan.routes for hop in route.hops)
    return Counter(hop.rank for route, hop in hops if plan.role_of[hop.rank].replica != route.replica)
