"""What a layout costs: replicas on their own by the pipeline formula's DAG, replicas that share work by simulation."""

from __future__ import annotations

import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.planners.costing import replica_us
from unskew.analytics.planners.joint.capability import members_needed
from unskew.analytics.planners.problem import Ints, PlannerCluster, PlannerJob, group_speeds
from unskew.analytics.planners.resihp.dp import stage_times
from unskew.analytics.planners.resihp.simulation import ReplicaSimulation


def iteration_us(cluster: PlannerCluster, layout: Layout) -> float:
    """The iteration at the cluster's present speeds: its slowest replica and its end; inf where work can be done by nobody."""
    job, layers, speeds, counts = cluster.job, layout.layers, group_speeds(cluster, layout), _counts(layout)
    alone = np.ones(len(counts), dtype=np.bool_)
    worst = 0.0
    for component in layout.components if layout.moves else ():
        if component.shape.moves:
            together = list(component.indices)
            alone[together] = False
            forward, backward = stage_times(cluster, layers[together], speeds[together])
            shared = ReplicaSimulation(forward, backward, counts[together].tolist(), component.shape.moves, job.message_us)
            worst = max(worst, *shared.run())
    ends = replica_us(job, layers[alone], speeds[alone], counts[alone])
    return max(worst, float(ends.max(initial=0.0))) + job.iteration_end_us


def holds(job: PlannerJob, layout: Layout) -> bool:
    """Has every group the memory for its layers and 1F1B's activations, those lent by other replicas left out?"""
    counts = _counts(layout)
    needed = members_needed(job, layout.layers, counts)
    return needed is None or bool((needed <= layout.degrees)[counts > 0].all())


def _counts(layout: Layout) -> Ints:
    return np.array([pipeline.micro_batches for pipeline in layout.pipelines], dtype=np.int64)
