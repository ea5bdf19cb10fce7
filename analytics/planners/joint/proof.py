"""A tighter lower bound than bounds.py, by integer programs: seconds instead of milliseconds, for a proof afterwards.

For a kind of replica and m micro-batches the program minimises the closed form of planners/costing.py over whole layers l >= 0:

    min T    T >= sum_{t<s} c_t l_t + m c_s l_s + a_s + b_s      for every stage s that holds layers
             a_s >= sum_{t>s} c_t l_t - n_s F_s l_s,  a_s >= 0   (b_s the same with B_s; one of the two where m <= n_s + 1)

n_s = stages behind s, all of them, though some may hold nothing: that only lowers the bound. Of each kind, programs are solved
from the largest m that bounds.py cannot rule out within the plan's own time downwards, until one is possible. They
raise that module's table, and the least T at which all replicas together reach the job's micro-batches is the bound. HiGHS
(scipy.optimize.milp); its dual bound counts, so a program that is cut off by its time limit still gives a valid one.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from unskew.analytics.planners.joint.bounds import kinds, least_time_us
from unskew.analytics.planners.joint.partition import best_speeds
from unskew.analytics.planners.problem import Floats, PlannerCluster, PlannerJob

PROGRAMS = 8
"""For each kind of replica at most so many programs."""


def proven_bound_us(cluster: PlannerCluster, predicted_us: float, *, limit_s: float = 5.0) -> float:
    """A lower bound of the iteration over all plans of separate pipelines; at most `predicted_us`, which a plan has reached.

    `limit_s`: seconds that each program may take.
    """
    job = cluster.job
    reached_us = predicted_us - job.iteration_end_us
    speeds, sizes, table = kinds(job, best_speeds(cluster))
    table = table.copy()
    for row, times in enumerate(table):
        open_counts = np.flatnonzero(times < reached_us * (1 - 1e-9))
        for m in open_counts[open_counts > 0][: -PROGRAMS - 1 : -1].tolist():
            least_us = _program_us(job, speeds[row][speeds[row] > 0], m, reached_us, limit_s)
            table[row, m] = max(table[row, m], least_us)
            if least_us < reached_us:
                break
    table = np.maximum.accumulate(table, axis=1)
    return min(predicted_us, job.iteration_end_us + least_time_us(job, table, sizes))


def _program_us(job: PlannerJob, speeds: Floats, m: int, reached_us: float, limit_s: float) -> float:
    """The lower bound of one replica with m micro-batches; `reached_us` when it cannot be below that."""
    stages = len(speeds)
    forward, backward = job.forward_us / speeds, job.backward_us / speeds
    both = forward + backward
    behind = stages - 1 - np.arange(stages)
    others, deep = np.minimum(behind, m - 1), m > behind + 1
    earlier, later = np.tril(np.tile(both, (stages, 1)), -1), np.triu(np.tile(both, (stages, 1)), 1)
    none, one = np.zeros((stages, stages)), np.eye(stages)
    big = 3.0 * reached_us
    column = np.zeros((stages, 1))
    # Variables: T, l, a, b, used.
    busy = np.hstack([column + 1, -earlier - np.diag(m * both), -one, -np.diag(deep.astype(float)), -big * one])
    first = np.hstack([column, np.diag(others * forward) - later, one, none, none])
    last = np.hstack(
        [column, np.diag(others * backward) - later, np.diag((~deep).astype(float)), np.diag(deep.astype(float)), none]
    )
    most = np.hstack([column, one, none, none, -job.n_layers * one])
    least = np.hstack([column, one, none, none, -one])
    total = np.concatenate([[0.0], np.ones(stages), np.zeros(3 * stages)])
    upper = np.concatenate([[np.inf], np.floor(reached_us / (m * both) + 1e-9), np.full(2 * stages, np.inf), np.ones(stages)])
    whole = np.concatenate([[0], np.ones(stages), np.zeros(2 * stages), np.ones(stages)])
    solution = milp(
        c=np.concatenate([[1.0], np.zeros(4 * stages)]),
        integrality=whole,
        bounds=Bounds(np.zeros(1 + 4 * stages), upper),
        constraints=[
            LinearConstraint(busy, np.full(stages, -big), np.inf),
            LinearConstraint(np.vstack([first, last, least]), 0.0, np.inf),
            LinearConstraint(most, -np.inf, 0.0),
            LinearConstraint(total[None], job.n_layers, job.n_layers),
        ],
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
    )
    if solution.status == 2:  # not possible within reached_us
        return reached_us
    return min(reached_us, float(solution.mip_dual_bound)) if solution.mip_dual_bound is not None else 0.0
