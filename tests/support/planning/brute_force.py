"""Every plan of a small job, to tell how far from the best a planner is.

The plans: every replica a pipeline of its own; per group any degree of its fastest members; per replica any layers over its
stages, none included; any division of the micro-batches. Replicas do not wait for each other, so the best plan is found from
tables: per replica and number of micro-batches the least makespan over all degrees and layers, then over all divisions.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from unskew.analytics.planners.costing import replica_us
from unskew.analytics.planners.joint.partition import members_needed
from unskew.analytics.planners.problem import PlannerCluster, PlannerJob
from unskew.analytics.planners.resihp.tp import degrees_allowed


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as a sum of `parts` counts of 0 or more."""
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in compositions(total - first, parts - 1)]


def best_us(cluster: PlannerCluster) -> float:
    """The least iteration (us) of all these plans; inf when none fits the memory."""
    job = cluster.job
    tables = [_table(cluster, replica) for replica in range(cluster.dp)]
    ends = min(max(tables[d][m] for d, m in enumerate(split)) for split in compositions(job.micro_batches, cluster.dp))
    return float(ends) + job.iteration_end_us


def _table(cluster: PlannerCluster, replica: int) -> list[float]:
    """The least makespan of a replica with 0, 1, ... micro-batches."""
    job, rates = cluster.job, cluster.rates
    choices = []
    for members in cluster.speeds[replica]:
        living = sorted((float(speed) for speed in members if speed > 0), reverse=True)
        possible = [k for k in degrees_allowed(cluster.tp, powers_of_two=False) if k <= len(living)]
        choices.append([(k, float(rates[k]) * living[k - 1]) for k in possible] or [(0, 0.0)])
    layers = np.array(compositions(job.n_layers, cluster.pp), dtype=np.int64)
    best = np.full(job.micro_batches + 1, np.inf)
    best[0] = 0.0
    for groups in product(*choices):
        degrees, speeds = (np.array(column) for column in zip(*groups, strict=True))
        alive = ~((layers > 0) & (speeds <= 0)).any(axis=1)
        for m in range(1, job.micro_batches + 1):
            counts = np.full(len(layers), m, dtype=np.int64)
            needed = members_needed(job, layers, counts)
            fits = True if needed is None else (needed <= degrees).all(axis=1)
            rows = np.flatnonzero(alive & fits)
            if len(rows):
                times = replica_us(job, layers[rows], np.tile(speeds, (len(rows), 1)), counts[rows])
                best[m] = min(best[m], times.min())
    return best.tolist()


def random_cluster(random: np.random.Generator, *, largest: int) -> PlannerCluster:
    """A small job on devices of which a third are slow or dead: up to 3 replicas, 4 stages, 4 members, `largest` layers."""
    dp, pp, tp = int(random.integers(1, 4)), int(random.integers(1, 5)), int(random.choice([1, 2, 4]))
    n_layers, micro_batches = (int(random.integers(least, max(least, largest) + 1)) for least in (pp, dp))
    measured = {1: (), 2: (0.55, 1.0), 4: (0.28, 0.55, 0.8, 1.0)}[tp]
    extra = float(random.choice([0.0, 1.2]))
    limit = {} if random.random() < 0.6 else {"layer_bytes": 1.0, "activation_bytes": 0.1}
    job = PlannerJob(
        n_layers=n_layers,
        micro_batches=micro_batches,
        embedding_layers=extra / 2,
        head_layers=extra,
        own_layers=extra / 3,
        message_us=float(random.choice([0.0, 0.2])),
        capacity_bytes=1.5 * n_layers / pp / tp * (1 + 0.1 * pp) if limit else None,
        **limit,
    )
    speeds = random.choice([1.0, 1.0, 1.0, 1.0, 0.9, 0.7, 0.5, 0.3, 0.15, 0.0], size=(dp, pp, tp))
    return PlannerCluster(job=job, speeds=speeds, efficiency=measured if random.random() < 0.5 else ())
