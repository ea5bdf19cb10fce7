"""What is left of a job laid out as if it began on it: any living group on any stage of any replica.

The joint planner keeps every group at its stage of its replica: right while state stays where it is. But four replicas of which
each has lost most of its stages may hold the model nowhere, and hold it twice together. Here the groups that live, the fastest
first, are dealt in rows to as many replicas as promise the shortest iteration, and the joint planner decides the rest. Rows
keep the groups of a node together, so that a node's loss leaves the copies of its layers in other replicas.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError, split_evenly
from unskew.analytics.planners.joint.capability import best_speeds
from unskew.analytics.planners.joint.joint import JointPlan, plan_joint
from unskew.analytics.planners.problem import Ints, PlannerCluster

SHAPES = 4
"""So many numbers of replicas are planned in full, those that promise most."""
SECOND_COPY = 1.1
"""One replica holds every layer once, and any death takes it back to the checkpoint: it must be faster by this factor."""


def plan_anew(cluster: PlannerCluster) -> JointPlan:
    """The plan of separate pipelines, at most as many as the job has replicas. Raises `PlanError` when none holds the model."""
    reach = best_speeds(cluster).ravel()
    living = np.flatnonzero(reach > 0)
    living = living[np.argsort(-reach[living], kind="stable")]
    plans: list[tuple[float, JointPlan]] = []
    for replicas in _shapes(cluster, len(living)):
        try:
            plan = _planned(cluster, living, replicas)
        except PlanError:
            continue
        plans.append((plan.predicted_us * (SECOND_COPY if len(plan.layout.pipelines) == 1 else 1.0), plan))
    if not plans:
        raise PlanError(f"{len(living)} groups are left and cannot hold the model in any order")
    return min(plans, key=lambda entry: entry[0])[1]


def _shapes(cluster: PlannerCluster, groups: int) -> list[int]:
    """Numbers of replicas whose rows have the memory for the model, by the makespan of equal stages, the shortest first."""
    job = cluster.job

    def promise(replicas: int) -> tuple[int, int]:
        stages = min(groups // replicas, job.n_layers)
        busiest = -(-job.n_layers // stages)
        return (-(-job.micro_batches // replicas) + stages - 1) * busiest, -replicas

    room = np.inf if job.capacity_bytes is None else job.capacity_bytes * cluster.tp
    needed = job.n_layers * job.layer_bytes
    possible = [n for n in range(1, min(cluster.dp, groups) + 1) if -(-groups // n) * room >= needed]
    return sorted(possible, key=promise)[:SHAPES]


def _planned(cluster: PlannerCluster, living: Ints, replicas: int) -> JointPlan:
    """The joint plan for the living slots in so many rows; a shorter row ends with a stage that nobody serves."""
    tp = cluster.tp
    sizes = [min(size, cluster.job.n_layers) for size in split_evenly(len(living), replicas)]
    slots = np.full((replicas, max(sizes)), -1, dtype=np.int64)
    for row, first in enumerate(accumulate(split_evenly(len(living), replicas)[:-1], initial=0)):
        slots[row, : sizes[row]] = np.sort(living[first : first + sizes[row]])
    devices = np.where(slots[:, :, None] >= 0, slots[:, :, None] * tp + np.arange(tp), -1)
    nodes = None if cluster.nodes is None else np.where(devices >= 0, cluster.nodes.ravel()[devices], -1)
    speeds = np.where(devices >= 0, cluster.speeds.ravel()[devices], 0.0)
    plan = plan_joint(msgspec.structs.replace(cluster, speeds=speeds, nodes=nodes), compare=False)
    number = devices.ravel().tolist()
    pipelines = tuple(
        msgspec.structs.replace(one, groups=tuple(tuple(sorted(number[device] for device in group)) for group in one.groups))
        for one in plan.layout.pipelines
        if one.micro_batches
    )
    return JointPlan(layout=Layout(pipelines), predicted_us=plan.predicted_us, source="anew")
