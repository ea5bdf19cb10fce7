"""Adaptra / PipeMorph (arXiv 2504.19232): extra warm-up forwards and a new order of chunks against slow links and devices."""

from __future__ import annotations

import math

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Pipeline
from unskew.analytics.planners.problem import working
from unskew.analytics.policies.base import FAIL_SLOW, ClusterView, Policy, Reaction
from unskew.analytics.policies.planning import planned


def warm_ups(job: Job, pipeline: Pipeline, delays_s: dict[int, float]) -> tuple[int, ...]:
    """``w_last = 1, w_i = w_{i+1} + ceil(c_i / t_F) + 2``: how many forwards stage i may have begun before its first backward;
    `delays_s`: c of the link behind a stage. As memory allows: at most twice what 1F1B's first stage keeps.

    >>> from unskew.analytics.cluster.job import JOBS
    >>> warm_ups(JOBS["llama2-13b"], healthy(JOBS["llama2-13b"]).pipelines[0], {})
    (7, 5, 3, 1)
    """
    forward_us = job.cost.chunks["F"].layer_us
    found = [1]
    for stage in reversed(range(len(pipeline.layers) - 1)):
        late = math.ceil(delays_s.get(stage, 0.0) * 1e6 / (forward_us * pipeline.layers[stage]))
        found.append(found[-1] + late + 2)
    return tuple(min(count, 2 * len(pipeline.layers)) for count in reversed(found))


class AdaptraPolicy(Policy):
    """Backward passes are split, and the order of the chunks is found anew for the devices and links as they are. Fail-stop is
    not handled: the job stops.

    Simplified: the order is list scheduling's (forwards up to the warm-up, then backwards, then weights' gradients) instead of
    one that is decided while it runs; messages block no kernels in the simulator, so the CPU-side RDMA path brings nothing.
    """

    name = "adaptra"
    sees = FAIL_SLOW
    slow_recall = constant("greyhound_slow_recall")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        if cluster.dead() & cluster.layout.devices:
            return Reaction(layout=None, reason="a device is dead: Adaptra answers fail-slow only")
        if (cluster.speeds >= 1.0).all() and not cluster.links:
            return Reaction(layout=healthy(job), redo="none", reason="nothing is slow")
        split = msgspec.structs.replace(planned(job, cluster.speeds, measured=True).job, schedule="zb-h1")
        ordered = working(msgspec.structs.replace(planned(job, cluster.speeds, measured=True), job=split), healthy(job))
        late = {
            one.replica: {stage: delay for (replica, stage), delay in cluster.links.items() if replica == one.replica}
            for one in ordered.pipelines
        }
        deeper = tuple(
            msgspec.structs.replace(one, in_flight=warm_ups(job, one, late[one.replica])) for one in ordered.pipelines
        )
        layout = min((cluster.layout, ordered, msgspec.structs.replace(ordered, pipelines=deeper)), key=cluster.seconds)
        return Reaction(layout=layout, redo="none", reason="warm-ups and order for the devices as they are")
