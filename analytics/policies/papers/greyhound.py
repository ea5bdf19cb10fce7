"""Greyhound / Falcon (ATC'25, arXiv 2410.12588): four strategies against fail-slow, each when waiting has cost as much as it.

S1 nothing; S2 micro-batches in proportion to the replicas' speeds; S3 nodes swapped so that stragglers gather in as few stages
as possible; S4 checkpoint and restart on other hardware. Ski rental: go on when ``slow time x (1 - t_healthy / t_slow)``
reaches the cost of the next strategy.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.cluster.timing import Speeds, fault_free_s, stage_speeds
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.core.sharing import proportional
from unskew.analytics.policies.base import FAIL_SLOW, ClusterView, Policy, Reaction, moved_layers, regroup
from unskew.analytics.policies.papers.recycle import redealt
from unskew.analytics.policies.restart import restarted

LEVEL_S = 1e-6
"""Times that differ by less are the same."""


def shares(layout: Layout, job: Job, speeds: Speeds) -> Layout:
    """S2: ``min max m_i t_i``, ``sum m_i = M``, at least one each; t_i is the time of a micro-batch at the slowest stage.

    >>> import numpy as np
    >>> from unskew.analytics.cluster.job import JOBS
    >>> job = JOBS["llama2-13b"]
    >>> [one.micro_batches for one in shares(healthy(job), job, np.array([0.5] + [1.0] * 31)).pipelines]
    [5, 11]
    """
    weights = [
        min(speed / n for speed, n in zip(stages, pipeline.layers, strict=True) if n and speed) if any(stages) else 0.0
        for pipeline, stages in zip(layout.pipelines, stage_speeds(job, layout, speeds), strict=True)
    ]
    able = [index for index, weight in enumerate(weights) if weight > 0]
    total = layout.micro_batches
    counts = dict(zip(able, proportional(total, [weights[index] for index in able], least=1), strict=True))
    pipelines = tuple(
        msgspec.structs.replace(pipeline, micro_batches=counts.get(index, 0)) for index, pipeline in enumerate(layout.pipelines)
    )
    return msgspec.structs.replace(layout, pipelines=tuple(pipeline for pipeline in pipelines if pipeline.micro_batches))


def gathered(job: Job, speeds: Speeds) -> Layout:
    """S3: the slowest groups of the job together: replicas are filled with slow groups first.

    Swapping whole groups (a node or half of one) changes which pipeline is slow; a pipeline runs at its slowest stage, so slow
    groups side by side hurt one replica instead of many. Inner stages first, as the paper prefers.
    """
    groups = [job.group(replica, stage) for replica in range(job.dp) for stage in range(job.pp)]
    slowest_first = sorted(groups, key=lambda group: (float(speeds[list(group)].min()), group))
    inner_first = sorted(range(job.pp), key=lambda stage: (stage in {0, job.pp - 1}, stage))
    whole = healthy(job)
    pipelines: list[Pipeline] = []
    for number, pipeline in enumerate(whole.pipelines):
        members = slowest_first[number * job.pp : (number + 1) * job.pp]
        placed = dict(zip(inner_first, members, strict=True))
        pipelines.append(msgspec.structs.replace(pipeline, groups=tuple(placed[stage] for stage in range(job.pp))))
    return msgspec.structs.replace(whole, pipelines=tuple(pipelines))


class GreyhoundPolicy(Policy):
    """Simplified: S3 swaps TP groups, not single nodes; a slow link is answered as a slow replica; S4 needs a spare for
    each node with a slow device; a death is S4 at once, without a spare on the replicas that are whole."""

    name = "greyhound"
    takes_spares = True
    sees = FAIL_SLOW | {"review"}
    checkpoint_s = constant("checkpoint_interval_s")
    false_alarm_s = constant("greyhound_false_alarm_s")
    false_alarms_per_hour = constant("greyhound_false_alarms_per_job")
    slow_recall = constant("greyhound_slow_recall")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job, dead = cluster.job, cluster.dead()
        if not cluster.unhurt():
            nodes = {job.node(device) for device in dead}
            if len(nodes) > cluster.spares:
                return restarted(cluster, "S4 without a spare")
            return Reaction(
                layout=healthy(job), pauses=(("restart", constant("restart_s")),), redo="checkpoint", spares=len(nodes),
                replaced=tuple(sorted(dead)), reason="S4: restart on spares",
            )  # fmt: skip
        if not (cluster.speeds < 1.0).any():
            back = moved_layers(cluster.holding(), healthy(job))
            return Reaction(layout=healthy(job), pauses=regroup(job, back) if back else (), reason="S1: healthy again")
        return self._rented(cluster, event)

    def _rented(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        """Ski rental: S2 at once, S3 and S4 when waiting has cost as much as they do."""
        job, slow = cluster.job, np.flatnonzero(cluster.speeds < 1.0).tolist()
        second = shares(cluster.layout, job, cluster.speeds)
        third = shares(gathered(job, cluster.speeds), job, cluster.speeds)
        as_it_is, now_s = cluster.seconds(cluster.layout), cluster.seconds(second)
        nodes = len({job.node(device) for device in slow})
        swap_s, restart_s = constant("topology_swap_s"), constant("checkpoint_stall_s") + constant("restart_s")
        found = [
            Reaction(layout=third, pauses=(("reconfigure", swap_s),), redo="none", reason="S3: stragglers gathered"),
            Reaction(
                layout=healthy(job), pauses=(("restart", restart_s),), redo="none", spares=nodes, replaced=tuple(slow),
                reason="S4: a checkpoint, and restart on spares",
            ),
        ]  # fmt: skip
        takes_s = [cluster.seconds(third), fault_free_s(job) if nodes <= cluster.spares else math.inf]
        slow_s = cluster.now_s - min(cluster.slow_since_s.values(), default=cluster.now_s)
        waits_s = [
            cost_s / (1.0 - seconds / now_s) - slow_s if seconds < now_s else math.inf
            for seconds, cost_s in zip(takes_s, (swap_s, restart_s), strict=True)
        ]
        due = [number for number, wait_s in enumerate(waits_s) if wait_s <= LEVEL_S and event.kind == "review"]
        next_s = min((wait_s for number, wait_s in enumerate(waits_s) if number > max(due, default=-1)), default=math.inf)
        later = (ClusterEvent(kind="review", at_s=cluster.now_s + max(1.0, next_s)),) if next_s < math.inf else ()
        layout = second if now_s < as_it_is else cluster.layout
        chosen = found[due[-1]] if due else Reaction(layout=layout, redo="none", reason="S2: micro-batches by speed")
        return msgspec.structs.replace(chosen, later=later)


class StrengthenedPolicy(Policy):
    """ResiHP's "strengthened" baselines: `inner` for deaths, Greyhound's detection and S2 for slow devices.

    Their known flaw stays: the inner policy reroutes work without knowing who is slow.
    """

    sees = FAIL_SLOW
    false_alarm_s = constant("greyhound_false_alarm_s")
    false_alarms_per_hour = constant("greyhound_false_alarms_per_job")
    slow_recall = constant("greyhound_slow_recall")

    def __init__(self, inner: Policy, name: str = ""):
        self._inner = inner
        self.name = name or f"strengthened-{inner.name}"

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        if event.kind in {"failed", "joined", "maintenance"}:
            answer = self._inner.react(cluster, event)
            base, pauses = answer.layout, answer.pauses
        else:
            base, pauses = cluster.layout, ()
            answer = Reaction(layout=base)
        if base is None:
            return answer
        layout = redealt(shares(base, cluster.job, cluster.speeds))
        if cluster.seconds(layout) >= cluster.seconds(base):
            layout = base
        if not pauses and layout != cluster.layout:
            pauses = regroup(cluster.job, 0)
        return msgspec.structs.replace(answer, layout=layout, pauses=pauses)
