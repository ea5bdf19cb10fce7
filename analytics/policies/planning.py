"""Between the simulator's layouts and the planners' arrays (analytics/planners/): the live Scheduler's planners decide here."""

from __future__ import annotations

import numpy as np

from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.layout import Layout, Move, Pipeline
from unskew.analytics.cluster.timing import Speeds, tp_slowdown
from unskew.analytics.core.constants import constant
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.problem import Assignment
from unskew.analytics.planners.problem import PlannerCluster as Planned
from unskew.analytics.planners.problem import PlannerJob as PlannedJob


def planned(job: Job, speeds: Speeds, *, measured: bool) -> Planned:
    """The job as the planners see it; `measured` False = TP efficiency is ideal, k / tp, as ResiHP's equation 4 has it."""
    forward, backward = job.cost.chunks["F"], job.cost.chunks["B"]
    layer_us = forward.layer_us + backward.layer_us
    head_us = (forward.head_us_per_token + backward.head_us_per_token) * job.seq
    shape = (job.dp, job.pp, job.tp)
    return Planned(
        job=PlannedJob(
            n_layers=job.n_layers, micro_batches=job.micro_batches, forward_us=forward.layer_us, backward_us=backward.layer_us,
            head_layers=head_us / layer_us, message_us=job.cost.message_us, iteration_end_us=job.cost.iteration_end_us,
            layer_bytes=job.parameters / job.n_layers * constant("bytes_per_parameter"),
            capacity_bytes=constant("hbm_gib_a100") * 2**30 * constant("memory_share"),
        ),
        speeds=speeds[: job.devices].reshape(shape),
        nodes=(np.arange(job.devices, dtype=np.int64) // job.gpus_per_node).reshape(shape),
        efficiency=tuple(1.0 / tp_slowdown(job, k) for k in range(1, job.tp + 1)) if measured else (),
    )  # fmt: skip


def layout_of(job: Job, assignment: Assignment) -> Layout:
    """What the planners decided, as the simulator runs it. A replica without work is left out.

    Raises `PlanError` when a stage without a group keeps work that no other replica takes.
    """
    taken = {(move.source, move.stage): 0 for move in assignment.moves}
    for move in assignment.moves:
        taken[move.source, move.stage] += len(move.micro_batches)
    for replica, stage in np.argwhere((assignment.speeds <= 0) & (assignment.layers > 0)).tolist():
        if taken.get((replica, stage), 0) < int(assignment.micro_batches[replica]):
            raise PlanError(f"stage {stage} of replica {replica} has no group, and no other takes its work")
    borrowed: dict[tuple[int, int], list[int]] = {}
    for one in assignment.borrowed:
        borrowed.setdefault((one.replica, one.stage), []).append(one.device)
    index_of: dict[int, int] = {}
    pipelines: list[Pipeline] = []
    needed = {move.target for move in assignment.moves}
    for replica in range(job.dp):
        count = int(assignment.micro_batches[replica])
        if count == 0 and replica not in needed:
            continue
        index_of[replica] = len(pipelines)
        groups = []
        for stage in range(job.pp):
            members = np.flatnonzero(assignment.active[replica, stage]) + job.device(replica, stage, 0)
            works = assignment.speeds[replica, stage] > 0
            groups.append((*members.tolist(), *borrowed.get((replica, stage), ())) if works else ())
        pipelines.append(Pipeline(replica, tuple(groups), tuple(assignment.layers[replica].tolist()), count))
    moves = tuple(
        Move(index_of[move.source], move.stage, index_of[move.target], tuple(move.micro_batches)) for move in assignment.moves
    )
    return Layout(tuple(pipelines), moves)
