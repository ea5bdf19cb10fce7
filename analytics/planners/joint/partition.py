"""What each group could do, and the best layers per stage for many pipelines at once (ours).

**What a group could do**: its fastest members in order, and its speed for every degree that memory may ask for.

`tables[..., k]` is the best speed of a group that must have at least k members, ``max over k' >= k of rate(k') x slowest of the
k' fastest``; column 0 is the best without any need, the last column (tp + 1 members) is 0. With a memory limit, the layers and
the micro-batches in flight decide how many members a stage needs; so degree, layers and micro-batches are chosen together.

**The layers.** Local search in closed form: from a few starts, again and again the best of all "one layer from stage a to
stage b", until none helps; a stage may end up with no layer, which takes it out of the pipeline (and shortens the fill), or
come back. Steps are judged by `pipeline_bound_us`, which nearly always is the makespan itself, for all pipelines in one array;
`polish` then judges the neighbours of the result by the makespan.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError
from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.costing import chunk_times, pipeline_bound_us, replica_us
from unskew.analytics.planners.problem import (
    Floats,
    Ints,
    PlannerCluster,
    PlannerJob,
    extra_layers,
    in_flight_of,
    layer_limits,
    layout_of,
)
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


def members_needed(job: PlannerJob, layers: Ints, micro_batches: Ints, *, again: bool = False) -> Ints | None:
    """[..., stages]: members that the memory of each stage asks for under 1F1B, `again`: when it recomputes; None without a
    memory limit."""
    if job.capacity_bytes is None:
        return None
    needed = job.stage_bytes(layers, in_flight_of(layers, micro_batches), again=again) / job.capacity_bytes
    return np.asarray(np.maximum(np.ceil(needed - 1e-9), 0)).astype(np.int64)


def speeds_at(job: PlannerJob, tables: Floats, layers: Ints, micro_batches: Ints) -> Floats:
    """[..., stages]: each stage's speed at the degree that its memory allows, recomputing where that is faster; 0 where none
    does."""
    most, in_flight = layers.max(initial=0), np.minimum(micro_batches.max(initial=1), layers.shape[-1])
    roomy = job.capacity_bytes is not None and job.stage_bytes(most, in_flight) <= job.capacity_bytes
    needed = None if roomy else members_needed(job, layers, micro_batches)
    if needed is None:  # nobody lacks memory
        return np.broadcast_to(tables[..., 0], layers.shape)
    wide = np.broadcast_to(tables, (*layers.shape, tables.shape[-1]))

    def at(members: Ints) -> Floats:
        column = np.minimum(members, tables.shape[-1] - 1)[..., None]
        return np.asarray(np.take_along_axis(wide, column, axis=-1)[..., 0])

    if job.given_bytes is None or (less := members_needed(job, layers, micro_batches, again=True)) is None:
        return at(needed)
    return np.maximum(at(needed), job.again_rate * at(less))


def settle(cluster: PlannerCluster, able: Capability, layers: Ints, micro_batches: Ints) -> Layout:
    """The layout with the degrees that go with these layers and micro-batches; of equal scores the larger degree."""
    tp = cluster.tp
    job, degree = cluster.job, np.arange(1, tp + 1)
    needed, less = (members_needed(job, layers, micro_batches, again=again) for again in (False, True))
    scores = able.scores
    if needed is not None and less is not None:
        recomputing = np.where(degree >= less[:, :, None], job.again_rate * scores, 0.0) if job.given_bytes is not None else 0.0
        scores = np.where(degree >= needed[:, :, None], scores, recomputing)
    best = scores.max(axis=2)
    chosen = tp - np.argmax(scores[:, :, ::-1] >= best[:, :, None] - EPSILON, axis=2)
    chosen = np.where(best > 0, chosen, 0)
    serves = np.arange(tp) < chosen[:, :, None]
    return layout_of(np.where(serves, able.order, -1), layers, micro_batches)


def holds(job: PlannerJob, layout: Layout) -> bool:
    """Has every group the memory for its layers and 1F1B's activations, those lent by other replicas left out?"""
    counts = np.array([pipeline.micro_batches for pipeline in layout.pipelines], dtype=np.int64)
    needed = members_needed(job, layout.layers, counts, again=True)
    return needed is None or bool((needed <= layout.degrees)[counts > 0].all())


DROPS = 4
STEPS = 60
POLISHED = 24
ROWS_AT_ONCE = 2_000_000


KEPT = 2
"""Of each pipeline so many distinct ends of the descents are polished."""


class PartitionSearch:
    """Descents of one job's pipelines, and what is best of them; what was found before is remembered."""

    def __init__(self, job: PlannerJob) -> None:
        self._job = job
        self._known: dict[bytes, Ints] = {}
        self._best: dict[bytes, tuple[Ints, float]] = {}

    def best(self, layers: Ints, tables: Floats, micro_batches: Ints) -> tuple[Ints, Floats]:
        """(layers, makespan) of each pipeline: layers as they are or where the descents end, all polished, whichever ends
        first."""
        keys = [_key(*row) for row in zip(tables, micro_batches, layers, strict=True)]
        new = {key: row for row, key in enumerate(keys) if key not in self._best}
        if new:
            rows = np.array([*new.values()])
            ends = [found[:KEPT] for found in self.descents(tables[rows], micro_batches[rows])]
            owner = np.concatenate([rows, np.repeat(rows, [len(found) for found in ends])])
            tried, times = polish(self._job, np.concatenate([layers[rows], *ends]), tables[owner], micro_batches[owner])
            for key, row in new.items():
                first = min(np.flatnonzero(owner == row), key=lambda at: times[at])
                self._best[key] = tried[first], float(times[first])
        found = [self._best[key] for key in keys]
        return np.array([row for row, _ in found]), np.array([us for _, us in found])

    def best_layers(self, tables: Floats, micro_batches: Ints) -> Ints:
        """Layers [n, stages] for pipelines whose stages can do `tables` [n, stages, tp + 2]; none for one that cannot hold the
        model."""
        none = np.zeros(tables.shape[1], dtype=np.int64)
        return np.array([found[0] if len(found) else none for found in self.descents(tables, micro_batches)])

    def descents(self, tables: Floats, micro_batches: Ints) -> list[Ints]:
        """Per pipeline the distinct ends [k, stages] of the descents from all its starts, the most promising first."""
        keys = [_key(*row) for row in zip(tables, micro_batches, strict=True)]
        new = {key: row for row, key in enumerate(keys) if key not in self._known}
        owner, starts = list[int](), list[Ints]()
        for row in new.values():
            found = _starts(self._job, tables[row], int(micro_batches[row]))
            owner += [row] * len(found)
            starts += found
        for key in new:
            self._known[key] = np.zeros((0, tables.shape[1]), dtype=np.int64)
        if starts:
            of = np.array(owner)
            ends, layers, bound = _descend(self._job, np.array(starts), tables[of], micro_batches[of], of)
            for key, row in new.items():
                own = np.flatnonzero(of[ends] == row)
                self._known[key] = layers[own[np.argsort(bound[own], kind="stable")]]
        return [self._known[key] for key in keys]


def _key(table: Floats, micro_batches: int, layers: Ints | None = None) -> bytes:
    """Of a pipeline, and of layers that it has."""
    return table.tobytes() + int(micro_batches).to_bytes(8) + (b"" if layers is None else layers.tobytes())


def polish(job: PlannerJob, layers: Ints, tables: Floats, micro_batches: Ints) -> tuple[Ints, Floats]:
    """(layers, makespan) after steps to the neighbour with the least makespan, among those that promise most in closed form."""
    layers = layers.copy()
    times = replica_us(job, layers, speeds_at(job, tables, layers, micro_batches), micro_batches)
    open_rows = np.flatnonzero(np.isfinite(times) & (micro_batches > 0))
    while len(open_rows) and layers.shape[1] > 1:
        near = neighbours(layers[open_rows])
        stages = near.shape[2]
        promise = bound_us(job, near, tables[open_rows][:, None], micro_batches[open_rows][:, None])
        kept = np.argsort(promise, axis=1, kind="stable")[:, :POLISHED]
        flat = np.take_along_axis(near, kept[:, :, None], axis=1).reshape(-1, stages)
        owner = np.repeat(open_rows, kept.shape[1])
        promised = np.take_along_axis(promise, kept, axis=1)
        worth = (promised < times[open_rows][:, None] * (1 - 1e-9)).ravel()
        exact = np.full(len(flat), np.inf)
        counts = micro_batches[owner[worth]]
        exact[worth] = replica_us(job, flat[worth], speeds_at(job, tables[owner[worth]], flat[worth], counts), counts)
        table = exact.reshape(kept.shape)
        best = table.argmin(axis=1)
        gain = table[np.arange(len(open_rows)), best] < times[open_rows] * (1 - 1e-9)
        winners = open_rows[gain]
        layers[winners] = flat.reshape(len(open_rows), -1, stages)[gain, best[gain]]
        times[winners] = table[gain, best[gain]]
        open_rows = winners
    return layers, times


def neighbours(layers: Ints) -> Ints:
    """[n, stages * (stages - 1), stages]: one layer from one stage to another; impossible ones have a negative count."""
    return np.asarray(layers[:, None, :] + _steps(layers.shape[-1])[None])


@lru_cache(maxsize=64)
def _steps(stages: int) -> Ints:
    step = np.eye(stages, dtype=np.int64)
    steps = [step[b] - step[a] for a in range(stages) for b in range(stages) if a != b]
    return np.array(steps, dtype=np.int64).reshape(-1, stages)


def _descend(job: PlannerJob, layers: Ints, tables: Floats, micro_batches: Ints, owner: Ints) -> tuple[Ints, Ints, Floats]:
    """Steepest descent of all rows side by side: (rows that ended [k], their layers [k, stages], their bounds [k]).

    A row that reaches layers where another of its owner has been would only follow it, and is dropped.
    """
    layers = layers.copy()
    bound = bound_us(job, layers, tables, micro_batches)
    visited: set[tuple[int, bytes]] = set()

    def first_there(rows: Ints) -> Ints:
        for row in rows.tolist():
            place = int(owner[row]), layers[row].tobytes()
            ended[row] = place not in visited
            visited.add(place)
        return rows[ended[rows]]

    ended = np.ones(len(layers), dtype=np.bool_)
    rows = first_there(np.arange(len(layers)))
    chunk = max(1, ROWS_AT_ONCE // max(1, layers.shape[1] ** 3))
    for _ in range(STEPS):
        improved = []
        for part in (rows[at : at + chunk] for at in range(0, len(rows), chunk)):
            near = neighbours(layers[part])
            if not near.shape[1]:
                continue
            judged = bound_us(job, near, tables[part][:, None], micro_batches[part][:, None])
            best = judged.argmin(axis=1)
            value = judged[np.arange(len(part)), best]
            better = value < bound[part] * (1 - 1e-9)
            layers[part[better]] = near[better, best[better]]
            bound[part[better]] = value[better]
            improved.append(part[better])
        rows = first_there(np.concatenate(improved)) if improved else rows[:0]
        if not len(rows):
            break
    rows = np.flatnonzero(ended)
    return rows, layers[rows], bound[rows]


def bound_us(job: PlannerJob, layers: Ints, tables: Floats, micro_batches: Ints) -> Floats:
    """The bound of the makespan, inf where a partition is not possible: negative, on a dead stage, or beyond the memory."""
    full = bool(layers.size) and layers.min() > 0
    speeds = speeds_at(job, tables, layers if full else np.maximum(layers, 0), micro_batches)
    if full and (tables[..., 0] if job.capacity_bytes is None else speeds).min() > 0:  # the usual case: nothing to rule out
        times = (layers + extra_layers(job, layers.shape[-1])) / speeds
        return pipeline_bound_us(times * job.forward_us, times * job.backward_us, micro_batches, job.message_us)
    used = layers > 0
    possible = (layers >= 0).all(axis=-1) & ~(used & (speeds <= 0)).any(axis=-1)
    forward, backward = chunk_times(job, layers, np.where(speeds > 0, speeds, 1.0))
    bound = pipeline_bound_us(forward, backward, micro_batches, job.message_us, used)
    return np.where(possible, bound, np.inf)


def _starts(job: PlannerJob, tables: Floats, micro_batches: int) -> list[Ints]:
    """Layers by speed over all living stages, and without the 1, 2, ... slowest while that may pay or must be;
    and without each slow stage alone."""
    speeds = tables[:, 0]
    alive = np.flatnonzero(speeds > 0)
    slowest = alive[np.argsort(speeds[alive], kind="stable")]
    starts: list[Ints] = []
    for dropped in range(min(DROPS, len(slowest))):
        shallow = micro_batches < 2 * len(alive)  # filling the pipeline counts: fewer stages may be faster though all are sound
        if dropped and speeds[slowest[dropped - 1]] > 0.6 * speeds[alive].max() and starts and not shallow:
            break
        kept = np.sort(slowest[dropped:])
        if (start := _by_speed(job, tables, kept, micro_batches)) is not None:
            starts.append(start)
    if len(alive) > 1:
        for stage in slowest[1:][speeds[slowest[1:]] < 0.9 * speeds[alive].max()].tolist():
            if (start := _by_speed(job, tables, alive[alive != stage], micro_batches)) is not None:
                starts.append(start)
    return starts


def _by_speed(job: PlannerJob, tables: Floats, kept: Ints, micro_batches: int) -> Ints | None:
    """Layers in proportion to speed, at most what the largest degree of each stage can hold."""
    in_flight = np.minimum(len(kept) - np.arange(len(kept)), max(micro_batches, 1))
    limits = layer_limits(job, (tables[kept, 1:] > 0).sum(axis=1), in_flight)
    extra = extra_layers(job, len(kept))
    parts = [(float(more / tables[s, 0]), float(1.0 / tables[s, 0])) for more, s in zip(extra, kept, strict=True)]
    try:
        shares = share_out(job.n_layers, parts, limits.tolist())
    except PlanError:
        return None
    layers = np.zeros(len(tables), dtype=np.int64)
    layers[kept] = shares
    return layers
