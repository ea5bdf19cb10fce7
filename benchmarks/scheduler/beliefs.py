"""Planners on wrong estimates: what a plan is worth when speeds, delays and costs are not what the planner assumed.

A planner plans for `estimated(cluster)` and is scored on the cluster as it is: the iteration of its plan over that of the plan
which it makes when it knows the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

import msgspec
import numpy as np
from support.planning.brute_force import random_cluster

from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.joint.partition import holds
from unskew.analytics.planners.problem import PlannerCluster, start
from unskew.analytics.planners.resihp.evaluation import iteration_us
from unskew.analytics.planners.resihp.progressive import plan_progressive
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.scheduler.planners import CASES, FIRST_SEED, LARGEST, SIZES, faulty_cluster

ERROR = 0.1
LARGE_SEEDS = 5
Plan = Callable[[PlannerCluster], Layout]
PLANNERS: dict[str, Plan] = {
    "joint planner": lambda cluster: plan_joint(cluster).layout,
    "ResiHP's levels": lambda cluster: plan_progressive(cluster).layout,
}


def figures(_bench: Bench) -> Iterator[Figure]:
    """Small random jobs with many faults, then the jobs of the planning times with 0.5 % faulty devices."""
    small = [random_cluster(np.random.default_rng(seed), largest=LARGEST) for seed in range(FIRST_SEED, FIRST_SEED + CASES)]
    yield from _figures(f"{CASES} small jobs", small)
    for shape, micro_batches, _ in SIZES[:3]:
        large = [faulty_cluster(shape, micro_batches, seed) for seed in range(LARGE_SEEDS)]
        yield from _figures(f"{large[0].speeds.size:,} devices", large)


def estimated(cluster: PlannerCluster, random: np.random.Generator, error: float) -> PlannerCluster:
    """What a planner assumes, each of these off by up to `error` on its own: the speeds of slow devices (who is healthy or dead
    is known), the efficiency of each TP degree below the nominal one, forward, backward, head, embedding, messages. Memory is
    known."""

    def off(shape: tuple[int, ...] = ()) -> np.ndarray:
        return 1.0 + random.uniform(-error, error, shape)

    job, speeds = cluster.job, cluster.speeds
    costs = ("forward_us", "backward_us", "embedding_layers", "head_layers", "message_us")
    slow = (speeds > 0) & (speeds < 1)
    rates = np.append(cluster.rates[1:-1] * off((cluster.tp - 1,)), cluster.rates[-1])
    return PlannerCluster(
        job=msgspec.structs.replace(job, **{name: float(getattr(job, name) * off()) for name in costs}),
        speeds=np.where(slow, np.clip(speeds * off(speeds.shape), 0.01, 1.0), speeds),
        nodes=cluster.nodes,
        efficiency=tuple(np.minimum(np.maximum.accumulate(rates), rates[-1]).tolist()),
    )


def _figures(what: str, clusters: list[PlannerCluster]) -> Iterator[Figure]:
    for name, plan in PLANNERS.items():
        losses, worse, could_stay = [], 0, 0
        for number, cluster in enumerate(clusters):
            estimates = estimated(cluster, np.random.default_rng(number), ERROR)
            try:
                right_us, wrong_us = (iteration_us(cluster, plan(one)) for one in (cluster, estimates))
            except PlanError:
                continue
            if not np.isfinite(right_us):
                continue
            losses.append(100.0 * (wrong_us / right_us - 1.0))
            present = start(cluster)
            if (cluster.speeds > 0).all() and holds(cluster.job, present):
                could_stay += 1
                worse += wrong_us > iteration_us(cluster, present) * (1 + 1e-9)
        yield figure(
            f"{name} told wrong by {ERROR:.0%}, {what}: iteration longer by", fmean(losses), "%", better="lower",
            note=f"worst {max(losses):.1f} %, best {min(losses):.1f} %; slower than changing nothing in {worse} of "
            f"{could_stay} that could",
        )  # fmt: skip
