"""What is left of a job laid out as if it began on it: any living group on any stage of any replica.

The joint planner keeps every group at its stage of its replica: right while state stays where it is. But four replicas of which
each has lost most of its stages may hold the model nowhere, and hold it twice together. Here the groups that live, the fastest
first, are dealt in rows to as many replicas as promise the shortest iteration, and the joint planner decides the rest. Rows
keep the groups of a node together, so that a node's loss leaves the copies of its layers in other replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import inf

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError, split_evenly
from unskew.analytics.core.sharing import proportional
from unskew.analytics.planners.joint.bounds import finish
from unskew.analytics.planners.joint.joint import JointPlan, plan_joint
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster
from unskew.analytics.planners.resihp.tp import EPSILON

SHAPES = 4
"""At most so many numbers of replicas are planned in full, those that promise most."""
TOO_LONG = 1.02
"""A promise is too long by no more than this: shapes that promise even longer than a plan takes are not planned."""
SECOND_COPY = 1.1
"""One replica holds every layer once, and any death takes it back to the checkpoint: it must be faster by this factor."""


def plan_anew(cluster: PlannerCluster) -> JointPlan:
    """The plan of separate pipelines, at most as many as the job has replicas. Raises `PlanError` when none holds the model."""
    crews = _groups(cluster)
    possible = [shape for end in range(1, len(crews) + 1) for shape in _shapes(cluster, np.concatenate(crews[:end]))]
    plans: list[tuple[float, JointPlan]] = []
    for promised_us, _, rows in sorted(possible, key=lambda shape: shape[:2])[:SHAPES]:
        if promised_us >= TOO_LONG * min((end_us for end_us, _ in plans), default=inf):
            break
        try:
            plan = _planned(cluster, rows)
        except PlanError:
            continue
        plans.append((plan.predicted_us * _handicap(len(plan.layout.pipelines)), plan))
    if not plans:
        raise PlanError("the groups that are left cannot hold the model in any order")
    return min(plans, key=lambda entry: entry[0])[1]


def _groups(cluster: PlannerCluster) -> list[Ints]:
    """[groups, tp] the devices of the living groups, -1 = none; then those of whom these are better off without. Where a
    node's groups reach more when its fastest devices are together, they are."""
    tp, speeds = cluster.tp, cluster.speeds.ravel()
    places = np.arange(speeds.size)
    if cluster.nodes is not None:
        nodes = cluster.nodes.ravel()
        by_speed = places.copy()
        by_speed[np.argsort(nodes, kind="stable")] = np.lexsort((-speeds, nodes))
        together, apart = (_reach(cluster, devices.reshape(-1, tp))[0] for devices in (by_speed, places))
        gain = np.bincount(cluster.nodes[:, :, 0].ravel(), weights=together - apart)
        places = np.where(gain[nodes] > EPSILON, by_speed, places)
    found, left = list[Ints](), places.reshape(-1, tp)
    while len(left := left[_reach(cluster, left)[0] > 0]):
        fastest = np.take_along_axis(left, np.argsort(-_speeds(cluster, left), axis=1, kind="stable"), axis=1)
        used = np.arange(tp) < _reach(cluster, left)[1][:, None]
        found.append(np.where(used, fastest, -1))
        left = np.where(used, -1, fastest)
    return found


def _speeds(cluster: PlannerCluster, groups: Ints) -> Floats:
    return np.where(groups >= 0, cluster.speeds.ravel()[groups], 0.0)


def _reach(cluster: PlannerCluster, groups: Ints) -> tuple[Floats, Ints]:
    """[groups]: the most that each reaches, and with how many of its fastest devices; of equal scores the larger degree."""
    scores = cluster.rates[1:] * np.sort(_speeds(cluster, groups), axis=1)[:, ::-1]
    best = scores.max(axis=1)
    return best, cluster.tp - np.argmax(scores[:, ::-1] >= best[:, None] - EPSILON, axis=1)


def _shapes(cluster: PlannerCluster, groups: Ints) -> Iterator[tuple[float, int, list[Ints]]]:
    """(the iteration that it promises, - replicas, the groups of each replica), the fastest groups dealt first."""
    reach = _reach(cluster, groups)[0]
    order = np.argsort(-reach, kind="stable")
    for replicas in range(1, min(cluster.dp, len(groups)) + 1):
        ends = list(accumulate(split_evenly(len(groups), replicas), initial=0))
        rows = [order[first : min(end, first + cluster.job.n_layers)] for first, end in pairwise(ends)]
        if (end_us := _promised_us(cluster, [reach[row] for row in rows])) < inf:
            yield _handicap(replicas) * end_us, -replicas, [groups[row] for row in rows]


def _handicap(replicas: int) -> float:
    return SECOND_COPY if replicas == 1 else 1.0


def _promised_us(cluster: PlannerCluster, rows: list[Floats]) -> float:
    """When rows of such groups have done all micro-batches: one goes through a row, the others follow at its busiest stage."""
    job = cluster.job
    room = inf if job.capacity_bytes is None else job.capacity_bytes * cluster.tp
    alike = Counter(tuple(row.tolist()) for row in rows if len(row) * room >= job.n_layers * job.layer_bytes)
    if not alike:
        return inf
    stages_us = [proportional(job.n_layers, row) / np.array(row) * job.layer_us for row in alike]
    m = np.arange(min(job.micro_batches, 4 * -(-job.micro_batches // len(rows)) + 16) + 1)
    ends_us = np.array([np.where(m > 0, stages.sum() + (m - 1) * stages.max(), 0.0) for stages in stages_us])
    return finish(ends_us, np.array(list(alike.values())), job.micro_batches, open_ended=True)[0] + job.iteration_end_us


def _planned(cluster: PlannerCluster, rows: list[Ints]) -> JointPlan:
    """The joint plan for these groups of each replica; a shorter row ends with a stage that nobody serves."""
    devices = np.full((len(rows), max(map(len, rows)), cluster.tp), -1, dtype=np.int64)
    for replica, row in enumerate(rows):
        devices[replica, : len(row)] = row[np.argsort(row.max(axis=1))]
    nodes = None if cluster.nodes is None else np.where(devices >= 0, cluster.nodes.ravel()[devices], -1)
    changes = {"speeds": _speeds(cluster, devices), "nodes": nodes}
    plan = plan_joint(msgspec.structs.replace(cluster, **changes), compare=False)
    number = devices.ravel().tolist()
    pipelines = tuple(
        msgspec.structs.replace(one, groups=tuple(tuple(sorted(number[device] for device in group)) for group in one.groups))
        for one in plan.layout.pipelines
        if one.micro_batches
    )
    return JointPlan(layout=Layout(pipelines), predicted_us=plan.predicted_us, source="anew")
