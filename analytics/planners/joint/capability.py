"""What each group could do: its fastest members in order, and its speed for every degree that memory may ask for.

`tables[..., k]` is the best speed of a group that must have at least k members, ``max over k' >= k of rate(k') x slowest of the
k' fastest``; column 0 is the best without any need, the last column (tp + 1 members) is 0. With a memory limit, the layers and
the micro-batches in flight decide how many members a stage needs; so degree, layers and micro-batches are chosen together.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, PlannerJob, layout_of
from unskew.analytics.planners.resihp.tp import EPSILON, TpGroups, exclude


class Capability(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`order` [dp, pp, tp]: device numbers, fastest first, -1 = none; `scores` [dp, pp, tp]; `tables` [dp, pp, tp + 2]."""

    order: Ints
    scores: Floats
    tables: Floats


def capability(cluster: PlannerCluster, groups: TpGroups) -> Capability:
    """From the groups of the TP level: who was lent is counted where it serves."""
    dp, pp, tp = cluster.speeds.shape
    flat = cluster.speeds.ravel().copy()
    flat[groups.members[groups.guests]] = 0.0
    order = np.argsort(-flat.reshape(dp, pp, tp), axis=2, kind="stable") + np.arange(dp * pp).reshape(dp, pp, 1) * tp
    speeds = flat[order]
    for replica, stage in np.argwhere(groups.guests.any(axis=2)).tolist():
        crew = groups.members[replica, stage]
        of_crew = np.where(crew >= 0, cluster.speeds.ravel()[crew], 0.0)
        fastest = np.lexsort((crew, -of_crew, crew < 0))
        order[replica, stage], speeds[replica, stage] = crew[fastest], of_crew[fastest]
    scores = cluster.rates[1:] * speeds
    at_least = np.maximum.accumulate(scores[:, :, ::-1], axis=2)[:, :, ::-1]
    tables = np.concatenate([at_least[:, :, :1], at_least, np.zeros((dp, pp, 1))], axis=2)
    return Capability(order=order.astype(np.int64), scores=scores, tables=tables)


def possible_lendings(cluster: PlannerCluster) -> tuple[TpGroups, ...]:
    """The groups when any degree may be chosen; and, where it differs, when only powers of two may: more members are left out
    then, whom other groups of the node can use."""
    any_degree = exclude(cluster, powers_of_two=False)
    if cluster.nodes is None:
        return (any_degree,)
    powers = exclude(cluster, powers_of_two=True)
    lends_otherwise = powers.guests.any() and not np.array_equal(_lent(powers), _lent(any_degree))
    return (any_degree, powers) if lends_otherwise else (any_degree,)


def _lent(groups: TpGroups) -> Ints:
    """Where devices are lent to: [device] the group that it serves as a guest, -1 = none."""
    group_of = np.full(groups.members.size, -1, dtype=np.int64)
    group_of[groups.members[groups.guests]] = np.flatnonzero(groups.guests) // groups.members.shape[2]
    return group_of


def best_speeds(cluster: PlannerCluster) -> Floats:
    """[dp, pp]: the most that each group reaches in any of these lendings."""
    speeds = [capability(cluster, groups).tables[:, :, 0] for groups in possible_lendings(cluster)]
    return np.asarray(np.maximum.reduce(speeds))


def members_needed(job: PlannerJob, layers: Ints, micro_batches: Ints) -> Ints | None:
    """[..., stages]: members that the memory of each stage asks for under 1F1B; None without a memory limit."""
    if job.capacity_bytes is None:
        return None
    order = np.cumsum(layers > 0, axis=-1)
    in_flight = np.minimum(order[..., -1:] - order + 1, np.maximum(np.asarray(micro_batches)[..., None], 1))
    needed = layers * (job.layer_bytes + in_flight * job.activation_bytes) / job.capacity_bytes
    return np.asarray(np.maximum(np.ceil(needed - 1e-9), 0)).astype(np.int64)


def speeds_at(job: PlannerJob, tables: Floats, layers: Ints, micro_batches: Ints) -> Floats:
    """[..., stages]: each stage's speed at the degree that its memory allows; 0 where none does."""
    needed = members_needed(job, layers, micro_batches)
    if needed is None:
        return np.broadcast_to(tables[..., 0], layers.shape)
    column = np.minimum(needed, tables.shape[-1] - 1)[..., None]
    wide = np.broadcast_to(tables, (*layers.shape, tables.shape[-1]))
    return np.asarray(np.take_along_axis(wide, column, axis=-1)[..., 0])


def settle(cluster: PlannerCluster, able: Capability, layers: Ints, micro_batches: Ints) -> Layout:
    """The layout with the degrees that go with these layers and micro-batches; of equal scores the larger degree."""
    dp, pp, tp = cluster.speeds.shape
    needed = members_needed(cluster.job, layers, micro_batches)
    degree = np.arange(1, tp + 1)
    allowed = degree >= (np.zeros((dp, pp, 1)) if needed is None else needed[:, :, None])
    scores = np.where(allowed, able.scores, 0.0)
    best = scores.max(axis=2)
    chosen = tp - np.argmax(scores[:, :, ::-1] >= best[:, :, None] - EPSILON, axis=2)
    chosen = np.where(best > 0, chosen, 0)
    serves = np.arange(tp) < chosen[:, :, None]
    return layout_of(np.where(serves, able.order, -1), layers, micro_batches)


def holds(job: PlannerJob, layout: Layout) -> bool:
    """Has every group the memory for its layers and 1F1B's activations, those lent by other replicas left out?"""
    counts = np.array([pipeline.micro_batches for pipeline in layout.pipelines], dtype=np.int64)
    needed = members_needed(job, layout.layers, counts)
    return needed is None or bool((needed <= layout.degrees)[counts > 0].all())
