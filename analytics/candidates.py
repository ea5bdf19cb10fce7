"""Candidate plans for a set of living ranks: each replica a pipeline of its own, ranks in the order of the run's first plan.

The layer counts of a replica and the micro-batch counts of all replicas are both found by `share_out`, which is exact for its
own question (the busiest part least busy); what the pipeline's fill and drain add is left to the evaluator and local search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from unskew.analytics.plan import Plan, plan_from_partition, split_evenly

Members = tuple[tuple[int, ...], ...]
"""Per replica its ranks in stage order; () for a replica that has none left."""


class Shape(msgspec.Struct, frozen=True):
    """A plan of separate pipelines: per replica its ranks in stage order, their layer counts, its micro-batches."""

    members: Members
    layers: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]

    def plan(self, like: Plan, epoch: int) -> Plan:
        """The shape as a plan for the model and schedule of `like`."""
        return plan_from_partition(
            epoch=epoch,
            n_layers=like.n_layers,
            schedule=like.schedule,
            members=self.members,
            layers=self.layers,
            micro_batches=self.micro_batches,
        )


class RankTime(msgspec.Struct, frozen=True):
    """Mean microseconds of F + B of one micro-batch on a rank at its believed speed: per layer, and for the output head."""

    layer_us: float
    head_us: float


def share_out(total: int, parts: Sequence[tuple[float, float]]) -> list[int]:
    """`total` units in shares of at least 1 such that the largest of ``fixed + each * share`` is as small as it can be.

    `parts` are (fixed, each). Greedy and exact: every unit goes to the part that it makes least large (Malleus' first program,
    for equal layers). Needs ``total >= len(parts)``.

    >>> share_out(12, [(0, 1 / 1.0), (0, 1 / 0.4), (0, 1 / 1.0)])
    [5, 2, 5]
    """
    shares = [1] * len(parts)
    heap = [(fixed + 2 * each, number) for number, (fixed, each) in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(total - len(parts)):
        number = heap[0][1]
        shares[number] += 1
        fixed, each = parts[number]
        heapq.heapreplace(heap, (fixed + each * (shares[number] + 1), number))
    return shares


def members_of(origin: Plan, alive: frozenset[int]) -> Members:
    """The living ranks of each replica, in the stage order of the run's first plan."""
    roles = sorted(origin.roles, key=lambda role: role.stage)
    replicas = range(1 + max(role.replica for role in roles))
    return tuple(tuple(role.rank for role in roles if role.replica == replica and role.rank in alive) for replica in replicas)


def named_shapes(
    plan: Plan, origin: Plan, members: Members, times: Mapping[int, RankTime], leavers: Sequence[int]
) -> Iterator[tuple[str, Shape]]:
    """The candidates with a name. `leavers` are slow ranks, the slowest first: doing without the first 1, 2, ... is tried."""
    if len(times) == len(origin.roles):
        counts = tuple(sum(route.replica == replica for route in origin.routes) for replica in range(len(members)))
        yield "as at the start of the run", Shape(members, tuple(_layers_held(origin, ranks) for ranks in members), counts)
    by_speed = tuple(_layers_by_speed(plan, ranks, times) for ranks in members)
    yield "layers and micro-batches by speed", shape_from(plan, members, by_speed, times)
    kept = tuple(_layers_held(plan, ranks) or fresh for ranks, fresh in zip(members, by_speed, strict=True))
    yield "micro-batches by speed, layers where they are", shape_from(plan, members, kept, times)
    if len({len(ranks) for ranks in members}) == 1:
        stages = [max((times[rank] for rank in stage), key=lambda time: time.layer_us) for stage in zip(*members, strict=True)]
        sizes = tuple(share_out(plan.n_layers, _layer_parts(stages)))
        even = tuple(split_evenly(len(plan.routes), len(members)))
        yield "one partition for all replicas (ResiHP)", Shape(members, (sizes,) * len(members), even)
    for count in range(1, len(leavers) + 1):
        without = tuple(tuple(rank for rank in ranks if rank not in leavers[:count]) for ranks in members)
        if any(without):
            layers = tuple(_layers_by_speed(plan, ranks, times) for ranks in without)
            yield f"without {', '.join(f'rank {rank}' for rank in leavers[:count])}", shape_from(plan, without, layers, times)


def _layers_by_speed(plan: Plan, ranks: Sequence[int], times: Mapping[int, RankTime]) -> tuple[int, ...]:
    return tuple(share_out(plan.n_layers, _layer_parts([times[rank] for rank in ranks]))) if ranks else ()


def _layer_parts(stages: Sequence[RankTime]) -> list[tuple[float, float]]:
    """What `share_out` needs: the last stage also has the output head."""
    return [(0.0, time.layer_us) for time in stages[:-1]] + [(stages[-1].head_us, stages[-1].layer_us)]


def _layers_held(plan: Plan, ranks: Sequence[int]) -> tuple[int, ...]:
    """The layer counts under `plan` if these ranks hold the whole model between them, else ()."""
    sizes = tuple(plan.role_of[rank].n_layers if rank in plan.role_of else 0 for rank in ranks)
    return sizes if sum(sizes) == plan.n_layers and all(sizes) else ()


def shape_from(plan: Plan, members: Members, layers: tuple[tuple[int, ...], ...], times: Mapping[int, RankTime]) -> Shape:
    """The shape whose micro-batch counts let the replicas finish together, by ``fill + (m - 1) * busiest stage``."""
    parts = []
    for ranks, sizes in zip(members, layers, strict=True):
        if ranks:
            costs = _layer_parts([times[rank] for rank in ranks])
            stages = [fixed + each * size for (fixed, each), size in zip(costs, sizes, strict=True)]
            parts.append((sum(stages) - max(stages), max(stages)))
    counts = iter(share_out(len(plan.routes), parts))
    return Shape(members, layers, tuple(next(counts) if ranks else 0 for ranks in members))


def neighbours(shape: Shape, busiest: int) -> Iterator[tuple[str, Shape]]:
    """One step from `shape`: a layer between two ranks of replica `busiest`, or a micro-batch from it to another replica."""
    sizes, ranks = shape.layers[busiest], shape.members[busiest]
    for giver in range(len(sizes)):
        for taker in range(len(sizes)):
            if giver != taker and sizes[giver] > 1:
                moved = tuple(size - (s == giver) + (s == taker) for s, size in enumerate(sizes))
                layers = tuple(moved if replica == busiest else other for replica, other in enumerate(shape.layers))
                yield (
                    f"refined: a layer from rank {ranks[giver]} to rank {ranks[taker]}",
                    msgspec.structs.replace(shape, layers=layers),
                )
    for taker, count in enumerate(shape.micro_batches):
        if taker != busiest and count > 0 and shape.micro_batches[busiest] > 1:
            counts = tuple(c - (r == busiest) + (r == taker) for r, c in enumerate(shape.micro_batches))
            yield (
                f"refined: a micro-batch from replica {busiest} to {taker}",
                msgspec.structs.replace(shape, micro_batches=counts),
            )
