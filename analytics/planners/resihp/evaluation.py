"""What a layout costs: replicas on their own under 1F1B by its fixed order, all others by the order of list scheduling: the one
that ranks execute."""

from __future__ import annotations

import numpy as np

from unskew.analytics.core.layout import Layout, to_plan
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.analytics.planners.costing import replica_us
from unskew.analytics.planners.problem import Floats, PlannerCluster, PlannerJob, group_speeds, scheduled
from unskew.collector.events import CHUNK_KINDS


def iteration_us(cluster: PlannerCluster, layout: Layout) -> float:
    """The iteration at the cluster's present speeds: its slowest replica and its end; inf where work can be done by nobody."""
    job, layers, speeds = cluster.job, layout.layers, group_speeds(cluster, layout)
    counts = np.array([pipeline.micro_batches for pipeline in layout.pipelines], dtype=np.int64)
    alone = np.ones(len(counts), dtype=np.bool_)
    known: dict[tuple[Layout, bytes], float] = {}
    for component in scheduled(cluster, layout).components if layout.moves or job.splits else ():
        if component.shape.moves or job.splits:
            together = list(component.indices)
            alone[together] = False
            if (key := (component.shape, speeds[together].tobytes())) not in known:
                known[key] = _listed_us(job, component.shape, speeds[together])
    ends = replica_us(job, layers[alone], speeds[alone], counts[alone])
    return max(0.0, *known.values(), float(ends.max(initial=0.0))) + job.iteration_end_us


def _listed_us(job: PlannerJob, shape: Layout, speeds: Floats) -> float:
    """The makespan of pipelines with one rank for each group; `speeds` [pipeline, stage]."""
    if not shape.micro_batches:
        return 0.0
    speed = {
        rank: speeds[row, stage]
        for row, pipeline in enumerate(shape.pipelines)
        for stage, group in enumerate(pipeline.groups)
        for rank in group
    }
    schedule = build_schedule(to_plan(shape, job.n_layers))
    if any(speed[action.rank] <= 0 for action in schedule.order):
        return float("inf")
    per_kind = dict(zip(CHUNK_KINDS, job.kinds_us, strict=False))
    durations = [
        (
            action.n_layers
            + job.own_layers
            + (job.embedding_layers if action.first_layer == 0 else 0.0)
            + (job.head_layers if action.first_layer + action.n_layers == job.n_layers else 0.0)
        )
        * per_kind[action.kind]
        / speed[action.rank]
        for action in schedule.order
    ]
    return float(evaluate(schedule, np.array(durations), job.message_us).makespan_us)
