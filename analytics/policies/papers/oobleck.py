"""Oobleck (SOSP'23): pipelines from templates of every size; a pipeline that loses a member takes the template one smaller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.core.plan import split_evenly
from unskew.analytics.core.sharing import proportional, share_out
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, moved_layers, regroup, survives
from unskew.analytics.policies.planning import planned

Group = tuple[int, ...]


def least_groups(job: Job) -> int:
    """The smallest template: TP groups that hold the model's state."""
    return -(-job.n_layers // job.most_layers)


def pipelines_of(job: Job, dead: set[int]) -> list[tuple[int, list[Group]]]:
    """(replica, its living groups), after pipelines below the smallest template have borrowed or been merged away.

    >>> from unskew.analytics.cluster.job import JOBS
    >>> [(replica, len(groups)) for replica, groups in pipelines_of(JOBS["llama2-13b"], {0, 4, 20})]
    [(0, 2), (1, 3)]
    """
    living: list[tuple[int, list[Group]]] = []
    for replica in range(job.dp):
        groups = [job.group(replica, stage) for stage in range(job.pp)]
        living.append((replica, [group for group in groups if dead.isdisjoint(group)]))
    least = least_groups(job)
    while small := [entry for entry in living if len(entry[1]) < least]:
        poor = min(small, key=lambda entry: len(entry[1]))
        rich = max((entry for entry in living if entry is not poor), key=lambda entry: len(entry[1]), default=None)
        if rich is not None and poor[1] and len(rich[1]) > least:
            poor[1].append(rich[1].pop())
            continue
        living.remove(poor)
        others = [entry for entry in living if len(entry[1]) < job.pp]
        for group in poor[1]:
            if others:
                min(others, key=lambda entry: len(entry[1]))[1].append(group)
                others = [entry for entry in living if len(entry[1]) < job.pp]
    return living


def template(job: Job, groups: int) -> tuple[int, ...]:
    """Layers of a pipeline of so many groups, such that its busiest stage, the output head counted, is least busy: what divide
    and conquer over pipeline times finds for layers that are alike."""
    head = head_layers(job)
    parts = [(0.0, 1.0)] * (groups - 1) + [(head, 1.0)]
    found, even = share_out(job.n_layers, parts, [job.most_layers] * groups), split_evenly(job.n_layers, groups)
    return min(tuple(even), tuple(found), key=lambda layers: busiest(layers, head))


def busiest(layers: Sequence[int], head: float) -> float:
    """The work of the busiest stage, in layers."""
    return max(*layers[:-1], layers[-1] + head) if len(layers) > 1 else layers[0] + head


def head_layers(job: Job) -> float:
    """What the output head takes, in layers."""
    return planned(job, np.ones(job.devices), measured=False).job.head_layers


def from_templates(job: Job, pipelines: list[tuple[int, list[Group]]], weights: list[float] | None = None) -> Layout:
    """The template of each pipeline's size; micro-batches so that pipelines end together (``weights``: their speeds)."""
    sizes = [template(job, len(groups)) for _, groups in pipelines]
    speeds = weights or [1.0 / busiest(layers, head_layers(job)) for layers in sizes]
    counts = proportional(job.micro_batches, speeds)
    return Layout(
        tuple(
            Pipeline(replica, tuple(groups), layers, count)
            for (replica, groups), layers, count in zip(pipelines, sizes, counts, strict=True)
        ),
        schedule=job.schedule,
    )


class OobleckPolicy(Policy):
    """As ResiHP runs it the unit is the TP group of a dead device, not the node (its small jobs have two nodes).

    Simplified: a merged pipeline never
    has more stages than the job had; the reconfiguration is one constant. Stops when a layer has lost its last holder.
    """

    name = "oobleck"

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        pipelines = pipelines_of(job, cluster.dead())
        if not pipelines:
            return Reaction(layout=None, reason="too few groups are left to hold the model")
        if not survives(cluster):
            return Reaction(layout=None, reason="a layer has lost its last holder")
        layout = from_templates(job, pipelines)
        if layout == cluster.layout:
            return Reaction(layout=layout)
        copying = regroup(job, moved_layers(cluster.holding(), layout))[0][1] - constant("regroup_s") - constant("planning_s")
        return Reaction(
            layout=layout, pauses=(("reconfigure", constant("oobleck_reconfigure_s") + copying),),
            reason=f"templates of {', '.join(str(len(groups)) for _, groups in pipelines)} groups",
        )  # fmt: skip
