"""The simulated job as the planners (analytics/planners/) take it: the live Scheduler's planners decide here."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.timing import Speeds, tp_slowdown
from unskew.analytics.core.constants import constant
from unskew.analytics.planners.problem import Level, PlannerCluster, PlannerJob
from unskew.analytics.planners.resihp.progressive import ALL_LEVELS, ProgressivePlan, plan_progressive


def planned(job: Job, speeds: Speeds, *, measured: bool) -> PlannerCluster:
    """The job as the planners see it; `measured` False = TP efficiency is ideal, k / tp, as ResiHP's equation 4 has it."""
    forward, backward = job.cost.chunks["F"], job.cost.chunks["B"]
    layer_us = forward.layer_us + backward.layer_us
    head_us = (forward.head_us_per_token + backward.head_us_per_token) * job.seq
    shape = (job.dp, job.pp, job.tp)
    return PlannerCluster(
        job=PlannerJob(
            n_layers=job.n_layers, micro_batches=job.micro_batches, forward_us=forward.layer_us, backward_us=backward.layer_us,
            head_layers=head_us / layer_us, message_us=job.cost.message_us, iteration_end_us=job.cost.iteration_end_us,
            layer_bytes=job.parameters / job.n_layers * constant("bytes_per_parameter"),
            capacity_bytes=job.room_bytes, schedule=job.schedule,
        ),
        speeds=speeds[: job.devices].reshape(shape),
        nodes=(np.arange(job.devices, dtype=np.int64) // job.gpus_per_node).reshape(shape),
        efficiency=tuple(1.0 / tp_slowdown(job, k) for k in range(1, job.tp + 1)) if measured else (),
    )  # fmt: skip


def with_ends(cluster: PlannerCluster, job: Job) -> PlannerCluster:
    """The same where embedding and head take their memory at the first and the last stage, and no part of each layer's."""
    ends = job.end_parameters if job.end_parameters is not None else (float(job.vocab * job.hidden),) * 2
    embedding, head = (parameters * constant("bytes_per_parameter") for parameters in ends)
    layer_bytes = max(cluster.job.layer_bytes - (embedding + head) / job.n_layers, 0.0)
    changed = msgspec.structs.replace(cluster.job, layer_bytes=layer_bytes, ends_bytes=(embedding, head))
    return msgspec.structs.replace(cluster, job=changed)


def three_levels(job: Job, speeds: Speeds, *, measured: bool, levels: frozenset[Level] = ALL_LEVELS) -> ProgressivePlan:
    """ResiHP's plan; policies that are compared under one seed ask for the same ones. Raises `PlanError`."""
    return _three_levels(job, speeds.tobytes(), measured, levels)


@lru_cache(maxsize=512)
def _three_levels(job: Job, speeds: bytes, measured: bool, levels: frozenset[Level]) -> ProgressivePlan:
    return plan_progressive(planned(job, np.frombuffer(speeds), measured=measured), levels=levels)
