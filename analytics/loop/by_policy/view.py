"""A run as policies see it (analytics/policies/base.py): its ranks as the devices of a job, its measured costs, its speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from unskew.analytics.cluster.job import ChunkTimes, Job, healthy
from unskew.analytics.cluster.timing import fault_free_s
from unskew.analytics.core.constants import constant
from unskew.analytics.core.cost import ChunkCost, CostModel, speed_of
from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.site import Site
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.policies.base import ClusterView

RECENT = 20
"""The mean micro-batch of so many iterations is what a job's micro-batches are like."""
_UNMEASURED = ChunkTimes(forward_us=1_000.0, backward_us=2_000.0)
"""Before there is a predictor: layers alike, a backward pass twice as long as a forward one."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a policy is asked before iteration `now`: the `plan` in force, and the ranks that are `alive` and
    measured."""

    now: int
    plan: Plan
    alive: frozenset[int]
    monitor: Monitor
    site: Site


def job_of(
    origin: Plan,
    layer_bytes: Sequence[int],
    cost: CostModel | None,
    works: Sequence[Work],
    *,
    units: int = 1,
    room_bytes: float | None = None,
) -> Job:
    """The job of a run that began with `origin`, by what its predictor has learned; micro-batches are the mean of `works`, and
    a layer can be cut in `units`; `room_bytes`: for how much of layers, counted so, a rank has memory. Its iterations' end
    has what of the gradients' sums comes after the last chunk under `origin`: policies price all plans with it."""
    tp, pp, dp = (1 + max(getattr(role, name) for role in origin.roles) for name in ("shard", "stage", "replica"))
    parameters = sum(layer_bytes) / constant("bytes_per_parameter")
    job = Job(
        name="run", tp=tp, dp=dp, pp=pp, n_layers=origin.n_layers, hidden=1, heads=max(units, 1), parameters=parameters,
        micro_batches=len(origin.routes), schedule=origin.schedule, measured=_UNMEASURED,
        tp_slowdowns=tuple(tp / k for k in range(1, tp + 1)), rank_room_bytes=room_bytes,
        end_parameters=_ends(layer_bytes) if layer_bytes else None,
    )  # fmt: skip
    if cost is None or not works:
        return job
    layer_us, tokens = _mean_layer_us(works), fmean(work.tokens for work in works)
    chunks = cost.joined.costs_at((cost.device_class, tp))
    alike = Work(round(tokens), round(fmean(work.sum_sq for work in works)))
    healthy_run = predict_iteration(origin, [alike] * len(origin.routes), cost)
    measured = ChunkTimes(
        forward_us=layer_us(chunks["F"]),
        backward_us=layer_us(chunks["B"]),
        head_forward_us=chunks["F"].head_us_per_token * tokens,
        head_backward_us=chunks["B"].head_us_per_token * tokens,
        message_us=cost.message_us + cost.message_token_us * tokens,
        iteration_end_us=healthy_run.iteration_us - float(healthy_run.timeline.makespan_us),
    )
    by_degree = [sum(map(layer_us, cost.costs_at((cost.device_class, k)).values())) for k in range(1, tp + 1)]
    return msgspec.structs.replace(job, measured=measured, tp_slowdowns=tuple(us / by_degree[-1] for us in by_degree))


def _ends(layer_bytes: Sequence[int]) -> tuple[float, float]:
    """The parameters of embedding and head: what the first and the last layer have more than those in the middle."""
    middle = median(layer_bytes[1:-1] or layer_bytes)
    first, last = (max(end - middle, 0.0) / constant("bytes_per_parameter") for end in (layer_bytes[0], layer_bytes[-1]))
    return first, last


def devices_of(known: RunFacts) -> tuple[float, ...]:
    """[device of the first plan]: estimated speed over all kinds of work, against a healthy device of the reference's class;
    0.0 where nobody lives. Ranks that the first plan did not have are no devices of the job."""
    monitor, cost, works = known.monitor, known.monitor.cost, _recent(known.monitor)

    def speed(rank: int) -> float:
        if rank not in known.alive:
            return 0.0
        if cost is None or not works:
            return 1.0
        layer_us, own = _mean_layer_us(works), cost.costs_at(cost.place_of(rank, cost.tp))
        takes = sum(layer_us(chunk) / speed_of(monitor.speeds, rank, kind) for kind, chunk in own.items())
        return round(sum(map(layer_us, cost.chunks.values())) / takes, 4)

    return tuple(map(speed, known.site.origin.ranks))


def view_of(known: RunFacts, layout: Layout | None, speeds: Sequence[float]) -> ClusterView:
    """As a policy is told; `layout`: what runs, None = the first plan; `speeds`: [device], those that it knows."""
    site, monitor = known.site, known.monitor
    works = _recent(monitor)
    job = job_of(site.origin, site.layer_bytes, monitor.cost, works, units=site.units, room_bytes=site.layers_room_bytes)
    iteration_s = fault_free_s(job)
    slow_since = {
        rank: monitor.verdicts[number].since_iteration * iteration_s
        for rank, number in monitor.detector.open.items()
        if monitor.verdicts[number].cause == "slow_device"
    }
    return ClusterView(
        job,
        known.now * iteration_s,
        np.array(speeds),
        _links(site.origin, monitor),
        layout or healthy(job),
        slow_since_s=slow_since,
    )


def _links(origin: Plan, monitor: Monitor) -> dict[tuple[int, int], float]:
    """The slow links by the boundary that they cross in the first plan."""
    found: dict[tuple[int, int], float] = {}
    for link in monitor.slow_links:
        ends = sorted((origin.role_of[rank].replica, origin.role_of[rank].stage) for rank in (link.sender, link.receiver))
        found[ends[0]] = max(found.get(ends[0], 0.0), link.more_us / 1e6)
    return found


def _recent(monitor: Monitor) -> list[Work]:
    return [work for works in monitor.retraining.recent(RECENT) for work in works]


def _mean_layer_us(works: Sequence[Work]) -> Callable[[ChunkCost], float]:
    """What one layer takes of the mean of these micro-batches."""
    tokens, sum_sq = fmean(work.tokens for work in works), fmean(work.sum_sq for work in works)
    return lambda chunk: chunk.layer_us + chunk.token_us * tokens + chunk.token2_us * sum_sq
