"""How long an iteration of a layout takes, by the one evaluator of pipelines (analytics/pipeline/prediction.py).

A TP group of k devices works like one device of speed ``min(speed) / slowdown(k)``. `slowdown` is 1.90 per halving, as Malleus
measured the first one (its next are 3.66 and 7.22, ours 3.61 and 6.86), not 2, and an uneven split of the attention heads costs
its rounding. Pipelines that exchange no work are evaluated alone, each distinct one once: the identical replicas of a large job
cost nothing.

With staggered optimisers (ReCycle, section 4.3) an iteration follows the last one as soon as each stage can: the period is the
longest time that a stage is busy, from its first chunk to its last over all replicas, whose gradients it reduces together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, zip_longest

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.constants import constant
from unskew.analytics.core.cost import CostModel, PlaceCost, SlowLink
from unskew.analytics.core.layout import Group, Layout, Pipeline, to_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.collector.events import CHUNK_KINDS

Speeds = NDArray[np.float64]
"""[device slot]: 1.0 healthy, 0.0 dead."""

Links = Mapping[tuple[int, int], float]
"""(replica, stage) -> seconds that every message between `stage` and `stage + 1` of the replica takes on top."""


def tp_slowdown(job: Job, k: int) -> float:
    """How many times longer a layer takes on `k` of the job's `tp` devices than on all of them.

    >>> from unskew.analytics.cluster.job import JOBS
    >>> tp_slowdown(JOBS["llama2-7b"], 2)
    1.9
    """
    if job.tp_slowdowns:
        return job.tp_slowdowns[k - 1]
    return _even_slowdown(job, k) * math.ceil(job.heads / k) * k / job.heads


def _even_slowdown(job: Job, k: int) -> float:
    """The same where each of the `k` has just as much of a layer."""
    return job.tp_slowdowns[k - 1] if job.tp_slowdowns else float(constant("tp_half_slowdown") ** math.log2(job.tp / k))


@lru_cache(maxsize=64)
def rank_cost(job: Job) -> CostModel:
    """The job's costs for plans of ranks (pipeline/prediction.py), with those of groups of every size up to `tp`."""
    others = tuple(
        PlaceCost(
            device_class="", tp=k, chunks={kind: one.times(_even_slowdown(job, k)) for kind, one in job.cost.chunks.items()}
        )
        for k in range(1, job.tp)
    )
    return msgspec.structs.replace(job.cost, tp=job.tp, others=others)


def slow_links(job: Job, links: Links) -> tuple[SlowLink, ...]:
    """The slow links between the ranks of the first plan, in both directions."""
    pairs = [
        (one, other, seconds)
        for (replica, stage), seconds in links.items()
        for one, other in zip(job.group(replica, stage), job.group(replica, stage + 1), strict=True)
    ]
    return tuple(SlowLink(*link, 1e6 * seconds) for one, other, seconds in pairs for link in ((one, other), (other, one)))


def rank_speeds(speeds: Speeds) -> dict[int, dict[str, float]]:
    """The speeds of those who live and are not healthy."""
    slow = np.flatnonzero((speeds > 0.0) & (speeds != 1.0)).tolist()
    return {rank: dict.fromkeys(CHUNK_KINDS, float(speeds[rank])) for rank in slow}


def stage_speeds(job: Job, layout: Layout, speeds: Speeds) -> list[tuple[float, ...]]:
    """Per pipeline the speed of each of its stages (four digits), 0.0 where a stage has nobody or a dead device."""
    slowdowns = {int(size): tp_slowdown(job, int(size)) for size in np.unique(layout.degrees) if size}
    return [
        _shared_speeds(job, pipeline, speeds)
        if pipeline.shares
        else tuple(
            round(speed / slowdowns[degree], 4) if degree else 0.0
            for speed, degree, _ in zip(slowest, degrees, pipeline.groups, strict=False)
        )
        for slowest, degrees, pipeline in zip(
            layout.slowest(speeds).tolist(), layout.degrees.tolist(), layout.pipelines, strict=True
        )
    ]


def _shared_speeds(job: Job, pipeline: Pipeline, speeds: Speeds) -> tuple[float, ...]:
    """The same where members have unequal parts of their group's layers."""

    def speed(group: Group, shares: tuple[int, ...]) -> float:
        parts = shares or (1,) * len(group)
        slowest = min((float(speeds[rank]) * sum(parts) / part for rank, part in zip(group, parts, strict=True)), default=0.0)
        even = _even_slowdown(job, len(group)) if shares else tp_slowdown(job, len(group))
        return round(slowest / len(group) / even, 4)

    return tuple(speed(*one) if one[0] else 0.0 for one in zip(pipeline.groups, pipeline.shares, strict=True))


def iteration_s(job: Job, layout: Layout, speeds: Speeds, links: Links | None = None) -> float:
    """Seconds of one iteration; infinite when a stage with work has a dead device, or nobody works."""
    if not layout.pipelines:
        return math.inf
    if layout.routed is not None:
        return _routed_s(job, layout, speeds, links or {})
    per_stage = stage_speeds(job, layout, speeds)
    busy: list[tuple[tuple[float, float], ...]] = []
    for part in layout.components:
        if any(_dead(layout.pipelines[index], per_stage[index]) for index in part.indices):
            return math.inf
        extra = _message_us(links, [layout.pipelines[index] for index in part.indices])
        busy.append(_busy_us(job, part.shape, tuple(per_stage[index] for index in part.indices), extra))
    if layout.staggered:
        stages = zip_longest(*busy, fillvalue=(math.inf, 0.0))
        period = max(max(end for _, end in stage) - min(begin for begin, _ in stage) for stage in stages)
    else:
        period = max(end for stages in busy for _, end in stages)
    return (period + job.cost.iteration_end_us) / 1e6


def _routed_s(job: Job, layout: Layout, speeds: Speeds, links: Links) -> float:
    """The same for a plan with ways of its own."""
    assert layout.routed is not None
    if (speeds[layout.members] <= 0.0).any():
        return math.inf
    return _of_plan_s(job, layout.routed, speeds.tobytes(), slow_links(job, links))


@lru_cache(maxsize=512)
def _of_plan_s(job: Job, plan: Plan, speeds: bytes, links: tuple[SlowLink, ...]) -> float:
    cost = msgspec.structs.replace(rank_cost(job), slow_links=links)
    return predict_iteration(plan, [job.work] * len(plan.routes), cost, rank_speeds(np.frombuffer(speeds))).iteration_us / 1e6


@lru_cache(maxsize=64)
def fault_free_s(job: Job) -> float:
    """The iteration of the whole, healthy job."""
    return iteration_s(job, healthy(job), np.ones(job.devices))


def capacity(job: Job, speeds: Speeds) -> float:
    """What is left of the job's devices, slow ones counted by their speed.

    A layout is faster than this share of fault-free only where it idles less than the first plan (fewer stages, better split).
    """
    return float(speeds[: job.devices].mean())


def _dead(pipeline: Pipeline, speeds: tuple[float, ...]) -> bool:
    return any(group and n and speed == 0.0 for group, n, speed in zip(pipeline.groups, pipeline.layers, speeds, strict=True))


def _message_us(links: Links | None, pipelines: Sequence[Pipeline]) -> float:
    """Messages of the component's worst link: the pipeline model has one message time."""
    if not links:
        return 0.0
    replicas = {pipeline.replica for pipeline in pipelines}
    return max((float(delay) * 1e6 for (replica, _), delay in links.items() if replica in replicas), default=0.0)


@lru_cache(maxsize=4096)
def _plan(layout: Layout, n_layers: int) -> Plan:
    return to_plan(layout, n_layers)


@lru_cache(maxsize=20000)
def _busy_us(
    job: Job, layout: Layout, stage_speeds: tuple[tuple[float, ...], ...], extra_us: float
) -> tuple[tuple[float, float], ...]:
    """When each stage of a component begins its first chunk and ends its last one, over the component's replicas."""
    plan = _plan(layout, job.n_layers)
    numbered = enumerate(chain.from_iterable(stage_speeds))
    speeds: dict[int, dict[str, float]] = {
        rank: dict.fromkeys(CHUNK_KINDS, speed) for rank, speed in numbered if speed not in {0.0, 1.0}
    }
    cost = CostModel(chunks=job.cost.chunks, message_us=job.cost.message_us + extra_us)
    works: list[Work] = [job.work] * len(plan.routes)
    timeline = predict_iteration(plan, works, cost, speeds).timeline
    stages: dict[int, tuple[float, float]] = {}
    for rank, positions in timeline.schedule.chunks.rank_positions():
        begin, end = float(timeline.start_us[positions[0]]), float(timeline.end_us[positions[-1]])
        first, last = stages.get(plan.role_of[rank].stage, (math.inf, 0.0))
        stages[plan.role_of[rank].stage] = min(first, begin), max(last, end)
    return tuple(stages.get(stage, (math.inf, 0.0)) for stage in range(max(stages) + 1))
