"""How fast any plan could be: a lower bound of the iteration, so that a planner's gap to the optimum is known without it.

`pipelines_bound_us` holds for all plans in which every replica is a pipeline of its own under 1F1B: any degree of its fastest
members, any layers, stages left out or not, any micro-batches. `capacity_bound_us` holds also for plans that move work between
replicas. Both take the groups' members as the planners lend them within a node (`possible_lendings`): a plan that swaps devices
between groups otherwise may be below.

One replica, m micro-batches, stage speeds v_s (dead ones left out), c_s = time of stage s for one micro-batch, so that
``sum v_s c_s = W``, the work of a micro-batch. planners/costing.py gives for every stage, with n stages behind it,

    T >= sum_{t < s} c_t + (m - n) c_s + 2 sum_{t > s} c_t                          if m > n + 1
    T >= sum_{t < s} c_t + (m + 1) / 2 c_s + sum_{t > s} c_t                        else

by max(0, x) + max(0, y) >= x + y and max(x, y) >= (x + y) / 2. Both stay true for a stage that holds nothing. Any weights
w >= 0 that sum to 1 give ``T >= sum_t a_t c_t``, hence ``T >= W min_t a_t / v_t``: linear programming's weak duality. The
weights that make all a_t / v_t equal solve a linear system; negative ones are set to 0, which keeps the bound valid.

Whole layers: some stage takes at least C = the least possible ``max_s c_s`` over whole layers, and with n = min(S - 1, m - 1)
``T >= m C + max(0, W / max v - C - n C / 2)``.

All replicas: at a time T, replica d can have finished at most ``max {m : bound_d(m) <= T}``; the least T at which these sum to
the job's micro-batches is the bound.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.core.sharing import proportional
from unskew.analytics.planners.joint.partition import best_speeds
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, PlannerJob


class IterationBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Lower bounds (us) of the iteration: for plans of separate pipelines, and for all that also move work between them."""

    pipelines_us: float
    capacity_us: float


def bounds(cluster: PlannerCluster) -> IterationBounds:
    """Both bounds for the cluster as it is; inf when nothing lives."""
    speeds = best_speeds(cluster)
    end_us = cluster.job.iteration_end_us
    return IterationBounds(
        pipelines_us=end_us + pipelines_bound_us(cluster.job, speeds),
        capacity_us=end_us + capacity_bound_us(cluster.job, speeds),
    )


def capacity_bound_us(job: PlannerJob, speeds: Floats) -> float:
    """All work at all groups' speeds together; at least one micro-batch's path at the highest speed."""
    total = float(speeds.sum())
    if total <= 0:
        return float("inf")
    work = _work_us(job)
    return max(job.micro_batches * work / total, work / float(speeds.max()))


def pipelines_bound_us(job: PlannerJob, speeds: Floats) -> float:
    """See the module's text; `speeds` [dp, pp] are the best that the groups can reach."""
    _, sizes, table = kinds(job, speeds)
    return least_time_us(job, table, sizes)


def kinds(job: PlannerJob, speeds: Floats) -> tuple[Floats, Ints, Floats]:
    """Distinct replicas with a living group: (speeds [n, pp], how many of each [n], bound [n, 0, 1, ... micro-batches])."""
    distinct, sizes = np.unique(speeds[(speeds > 0).any(axis=1)], axis=0, return_counts=True)
    usual = -(-job.micro_batches // len(speeds))
    most = min(job.micro_batches, 4 * usual + 16)
    tables = [_replica_bounds(job, row[row > 0], most, usual) for row in distinct]
    table = np.maximum.accumulate(np.stack(tables), axis=1) if tables else np.zeros((0, most + 1))
    return distinct, sizes.astype(np.int64), table


def least_time_us(job: PlannerJob, table: Floats, sizes: Ints) -> float:
    """The least T at which the replicas together may have finished the job's micro-batches.

    A table that ends too early counts as finished at its end, which keeps the bound valid.
    """
    return finish(table, sizes, job.micro_batches, open_ended=True)[0] if len(table) else float("inf")


def finish(table: Floats, sizes: Ints, total: int, *, open_ended: bool = False) -> tuple[float, Ints]:
    """(the least T, what each kind can do by then) such that the kinds' replicas together finish `total` micro-batches.

    `table` [kind, 0, 1, ... micro-batches] are times, never falling, `sizes` how many replicas are of each kind. `open_ended`:
    a kind that comes to the end of its row can do any number.
    """
    most = table.shape[1] - 1

    def possible(limit_us: float) -> Ints:
        counts = (table <= limit_us * (1 + 1e-12)).sum(axis=1) - 1
        return np.asarray(np.where(counts >= most, total, counts) if open_ended else counts)

    values = np.unique(table)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if int((possible(values[middle]) * sizes).sum()) >= total:
            high = middle
        else:
            low = middle + 1
    return float(values[low]), possible(values[low])


def _replica_bounds(job: PlannerJob, speeds: Floats, most: int, usual: int) -> Floats:
    """[most + 1]: the bound for 0, 1, ... micro-batches on stages of these speeds, all above 0."""
    bound = np.zeros(most + 1)
    stages = len(speeds)
    if not stages:
        return np.full(most + 1, np.inf)
    work = _work_us(job)
    weights = _weights(speeds, usual)
    busiest = least_busiest(job, speeds)
    for m in range(1, most + 1):
        relaxed = work * float((_coefficients(stages, m).T @ weights / speeds).min())
        others = min(stages - 1, m - 1)
        whole = m * busiest + (max(0.0, work / speeds.max() - busiest * (1 + others / 2)) if m >= 1 + others / 2 else 0.0)
        bound[m] = max(relaxed, whole)
    return bound


def _coefficients(stages: int, micro_batches: int) -> Floats:
    """[s, t]: what c_t counts in the inequality of stage s."""
    stage = np.arange(stages)
    behind = stages - 1 - stage
    deep = micro_batches > behind + 1
    rows = np.where(stage[None, :] < stage[:, None], 1.0, np.where(deep[:, None], 2.0, 1.0))
    np.fill_diagonal(rows, np.where(deep, micro_batches - behind, (micro_batches + 1) / 2))
    return rows


def _weights(speeds: Floats, micro_batches: int) -> Floats:
    """Weights of the stages' inequalities, 0 or more, that sum to 1."""
    try:
        weights = np.linalg.solve(_coefficients(len(speeds), micro_batches).T, speeds)
    except np.linalg.LinAlgError:
        weights = np.ones(len(speeds))
    weights = np.maximum(weights, 0.0)
    return np.asarray(weights / weights.sum())


def least_busiest(job: PlannerJob, speeds: Floats) -> float:
    """The least possible time (us) of the busiest stage for one micro-batch over whole layers, 0 included."""
    shares = proportional(job.n_layers, speeds.tolist())
    return float((shares / speeds).max()) * job.layer_us


def _work_us(job: PlannerJob) -> float:
    return (job.n_layers + job.embedding_layers + job.head_layers) * job.layer_us
