"""The joint planner: degrees, layers and micro-batches together, per replica (ours).

Every replica is a pipeline of its own with its own partition, which takes the problem apart:

1. TP: per group the degree with the most throughput that its share of the memory allows, any degree, by the measured
   efficiency (resihp/tp.py, partition.py); standby is lent within a node, in two orders where the
   second gives more throughput in all;
2. equal replicas form a class; of a job of 98,304 devices only those with a fault differ;
3. PP: per class the layers that make its pipeline fastest for its share of micro-batches (partition.py);
4. DP: micro-batches over replicas such that the slowest is fastest, exact for the classes' times ``T_c(m)``: the smallest T at
   which ``sum_c n_c max {m : T_c(m) <= T}`` reaches the job's micro-batches. 3 and 4 alternate until nothing changes;
5. refinement by the makespan: layers of the slowest class, one micro-batch from the slowest replica to where it ends earliest;
6. doing nothing and ResiHP's three levels (which may also lend single stages) are candidates too: the best of the three wins.

planners/joint/bounds.py bounds how far from the optimum the result can be at most.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.costing import distinct, replica_us
from unskew.analytics.planners.joint.bounds import finish
from unskew.analytics.planners.joint.partition import (
    Capability,
    PartitionSearch,
    bound_us,
    capability,
    holds,
    polish,
    possible_lendings,
    settle,
    speeds_at,
)
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, PlannerJob, start
from unskew.analytics.planners.resihp.evaluation import iteration_us
from unskew.analytics.planners.resihp.progressive import plan_progressive

ROUNDS = 4
SEARCHED = 32
"""Up to so many distinct slowest replicas are searched from all starts; more are only refined."""
TABLE_CELLS = 4_000_000


class JointPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The layout, its predicted iteration and where it comes from ("joint", "nothing", "progressive" or "anew")."""

    layout: Layout
    predicted_us: float
    source: str


class ReplicaClasses(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Distinct replicas: what their stages can do [classes, pp, tp + 2], how many there are, the class of each replica [dp]."""

    tables: Floats
    sizes: Ints
    of_replica: Ints


def plan_joint(cluster: PlannerCluster, *, compare: bool = True) -> JointPlan:
    """The plan for the cluster as it is. Raises `PlanError` when no replica can hold the model, alone or with its peers' help.

    `compare=False` leaves out step 6's comparison with ResiHP's levels, which takes most of the time of very large jobs.
    """
    first, *others = (capability(cluster, groups) for groups in possible_lendings(cluster))
    reach = float(first.tables[:, :, 0].sum())
    candidates = [_own_pipelines(cluster, one) for one in (first, *others) if one is first or one.tables[:, :, 0].sum() > reach]
    present = start(cluster)
    if (cluster.speeds > 0).all() and holds(cluster.job, present):
        candidates.append(JointPlan(layout=present, predicted_us=iteration_us(cluster, present), source="nothing"))
    if compare:
        try:
            levels = plan_progressive(cluster)
            candidates.append(JointPlan(layout=levels.layout, predicted_us=levels.predicted_us, source="progressive"))
        except PlanError:
            pass
    if cluster.job.splits:  # the search prices 1F1B
        candidates = [msgspec.structs.replace(one, predicted_us=iteration_us(cluster, one.layout)) for one in candidates]
    best = min(candidates, key=lambda plan: (plan.predicted_us * (1 - 1e-9 * (plan.source == "nothing")), plan.source))
    if not np.isfinite(best.predicted_us):
        raise PlanError("no replica that is left can hold the model: a checkpoint and another layout are needed")
    return best


def _own_pipelines(cluster: PlannerCluster, able: Capability) -> JointPlan:
    """Steps 2 to 5."""
    job, search = cluster.job, PartitionSearch(cluster.job)
    classes = classes_of(able.tables)
    rows = classes.of_replica
    share = np.full(len(classes.sizes), -(-job.micro_batches // cluster.dp), dtype=np.int64)
    best: tuple[float, Ints, Ints] | None = None
    for _ in range(ROUNDS):
        layers = search.best_layers(classes.tables, share)
        counts = share_micro_batches(job, classes, layers, cluster.dp)
        if counts is None:
            break
        times = replica_us(job, layers[rows], speeds_at(job, able.tables, layers[rows], counts), counts)
        if best is None or times.max() < best[0]:
            best = (float(times.max()), layers[rows], counts)
        new = np.zeros(len(classes.sizes), dtype=np.int64)
        np.maximum.at(new, rows, counts)
        if (new == share).all():
            break
        share = new
    if best is None:
        return JointPlan(layout=start(cluster), predicted_us=np.inf, source="joint")
    layers, counts, predicted_us = refine(job, search, able.tables, best[1], best[2])
    layout = settle(cluster, able, layers, counts)
    return JointPlan(layout=layout, predicted_us=predicted_us + job.iteration_end_us, source="joint")


def classes_of(tables: Floats) -> ReplicaClasses:
    """Replicas whose stages can do the same, together."""
    first, of_replica = distinct(tables)
    return ReplicaClasses(tables=tables[first], sizes=np.bincount(of_replica), of_replica=of_replica)


def share_micro_batches(job: PlannerJob, classes: ReplicaClasses, layers: Ints, dp: int) -> Ints | None:
    """[dp]: micro-batches per replica such that the slowest ends first; exact for the closed form of the classes' times.

    None when no class holds the model.
    """
    able = np.flatnonzero(layers.sum(axis=1) == job.n_layers)
    if not len(able):
        return None
    most = min(job.micro_batches, 3 * -(-job.micro_batches // dp) + layers.shape[1])
    table = time_table(job, layers[able], classes.tables[able], most)
    sizes = classes.sizes[able]
    if int(sizes.sum()) * most < job.micro_batches:
        table = time_table(job, layers[able], classes.tables[able], job.micro_batches)
    per_class = np.zeros(len(classes.sizes), dtype=np.int64)
    per_class[able] = finish(table, sizes, job.micro_batches)[1]
    counts = per_class[classes.of_replica]
    surplus = int(counts.sum()) - job.micro_batches
    padded = np.zeros((len(classes.sizes), table.shape[1]))
    padded[able] = table
    while surplus > 0:
        ends = padded[classes.of_replica, counts]
        slowest = np.lexsort((np.arange(dp), -ends))[: min(surplus, int((counts > 0).sum()))]
        slowest = slowest[counts[slowest] > 0]
        counts[slowest] -= 1
        surplus -= len(slowest)
    return counts


def time_table(job: PlannerJob, layers: Ints, tables: Floats, most: int) -> Floats:
    """[classes, most + 1]: the closed form of each class' time with 0, 1, ... micro-batches, never falling."""
    m = np.arange(most + 1)
    parts = np.array_split(np.arange(len(layers)), max(1, layers.size * len(m) // TABLE_CELLS))
    rows = [
        bound_us(job, np.repeat(layers[part][:, None], len(m), axis=1), tables[part][:, None], np.tile(m, (len(part), 1)))
        for part in parts
        if len(part)
    ]
    return np.maximum.accumulate(np.concatenate(rows), axis=1)


def refine(job: PlannerJob, search: PartitionSearch, tables: Floats, layers: Ints, counts: Ints) -> tuple[Ints, Ints, float]:
    """(layers, micro-batches, makespan): step 5, until the slowest replica can neither be sped up nor relieved."""
    layers, times = _polished(job, search, tables, layers, counts)
    moved = False
    for _ in range(8 * len(counts)):
        slowest = int(times.argmax())
        if counts[slowest] < 1:
            break
        trial = counts + 1
        trial[slowest] = counts[slowest] - 1
        ends = replica_us(job, layers, speeds_at(job, tables, layers, trial), trial)
        ends[slowest] = np.inf
        takers, soon_enough_us = np.argsort(ends, kind="stable")[:2], times[slowest] * (1 - 1e-9)
        for taker in takers[takers != slowest].tolist():
            pair = np.array([taker, slowest])
            # Who takes on more ends too late in most cases: then the other is not looked at.
            if all(search.best(layers[[one]], tables[[one]], trial[[one]])[1][0] < soon_enough_us for one in pair):
                layers[pair], times[pair] = search.best(layers[pair], tables[pair], trial[pair])
                counts[pair], moved = trial[pair], True
                break
        else:
            if not moved:
                break
            (layers, times), moved = _polished(job, search, tables, layers, counts), False  # others may be the slowest now
    return layers, counts, float(times.max())


def _polished(job: PlannerJob, search: PartitionSearch, tables: Floats, layers: Ints, counts: Ints) -> tuple[Ints, Floats]:
    """A further search for every distinct replica that is among the slowest; all others keep their layers."""
    layers = layers.copy()
    times = replica_us(job, layers, speeds_at(job, tables, layers, counts), counts)
    while True:
        rows = np.flatnonzero(times >= times.max() * (1 - 1e-9))
        first, inverse = distinct(tables[rows], layers[rows], counts[rows][:, None])
        picked = rows[first]
        if len(picked) <= SEARCHED:
            better, better_us = search.best(layers[picked], tables[picked], counts[picked])
        else:
            better, better_us = polish(job, layers[picked], tables[picked], counts[picked])
        before = times.max()
        layers[rows], times[rows] = better[inverse], better_us[inverse]
        if not times.max() < before * (1 - 1e-9):
            return layers, times
