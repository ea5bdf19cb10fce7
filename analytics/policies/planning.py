"""The simulated job as the planners (analytics/planners/) take it: the live Scheduler's planners decide here."""

from __future__ import annotations

from functools import lru_cache

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


def three_levels(job: Job, speeds: Speeds, *, measured: bool, levels: frozenset[Level] = ALL_LEVELS) -> ProgressivePlan:
    """ResiHP's plan; policies that are compared under one seed ask for the same ones. Raises `PlanError`."""
    return _three_levels(job, speeds.tobytes(), measured, levels)


@lru_cache(maxsize=512)
def _three_levels(job: Job, speeds: bytes, measured: bool, levels: frozenset[Level]) -> ProgressivePlan:
    return plan_progressive(planned(job, np.frombuffer(speeds), measured=measured), levels=levels)
