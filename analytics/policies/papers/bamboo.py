"""Bamboo (NSDI'23): each group also holds the next stage's layers, and executes both when that stage's group is lost."""

from __future__ import annotations

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.core.sharing import proportional
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, from_checkpoint, regroup, survives, wait

Group = tuple[int, ...]


def shadowed(pipeline: Pipeline, dead: set[int]) -> Pipeline | None:
    """The pipeline in which the group before each lost one executes both stages (in a circle); None when that group is lost too
    or executes two already: a fatal failure.

    >>> from unskew.analytics.cluster.job import JOBS
    >>> whole = healthy(JOBS["llama2-7b"]).pipelines[0]
    >>> shadowed(whole, {1}).groups
    ((4, 5, 6, 7), (4, 5, 6, 7))
    """
    groups = list(pipeline.groups)
    lost = [stage for stage, group in enumerate(groups) if not dead.isdisjoint(group)]
    for stage in lost:
        before = groups[stage - 1]
        if len(groups) < 2 or not dead.isdisjoint(before) or groups.count(before) > 1:
            return None
        groups[stage] = before
    return msgspec.structs.replace(pipeline, groups=tuple(groups))


def formed(job: Job, dead: set[int]) -> list[Pipeline]:
    """After a rendezvous of all: as many whole pipelines as the living groups make, each group at its stage where it can be."""
    whole = healthy(job).pipelines
    living = [group for one in whole for group in one.groups if dead.isdisjoint(group)]
    rows = len(living) // job.pp
    rich = sorted(whole, key=lambda one: (-sum(dead.isdisjoint(group) for group in one.groups), one.replica))[:rows]
    kept = {group for one in rich for group in one.groups if dead.isdisjoint(group)}
    spare = [group for group in living if group not in kept]
    return [
        msgspec.structs.replace(one, groups=tuple(group if dead.isdisjoint(group) else spare.pop(0) for group in one.groups))
        for one in sorted(rich, key=lambda one: one.replica)
    ]


class BambooPolicy(Policy):
    """A lost stage is taken over where it is; after a fatal failure, or when that is faster by then, all groups form whole
    pipelines anew and what is left over waits.

    Simplified: the unit is the TP group; the redundant forward costs nothing while all live (the paper runs it in bubbles), and
    the second copy of the layers needs no memory; pipelines that end late get fewer micro-batches.
    """

    name = "bamboo"
    checkpoint_s = constant("checkpoint_interval_s")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job, dead = cluster.job, cluster.dead()
        taken = [one for pipeline in healthy(job).pipelines if (one := shadowed(pipeline, dead)) is not None]
        local, anew = (_with_shares(job, pipelines) for pipelines in (taken, formed(job, dead)))
        best = min((local, anew), key=cluster.seconds)
        if not best.pipelines:
            return wait("no whole pipeline is left")
        if not survives(cluster):
            return from_checkpoint(best)
        if best == cluster.layout:
            return Reaction(layout=best, reason="the plan stays")
        in_place = best == local and len(taken) == job.dp
        pause_s = constant("bamboo_local_s") if in_place else constant("oobleck_reconfigure_s")
        pauses = regroup(job, 0) if cluster.unhurt() else (("reconfigure", pause_s),)
        return Reaction(
            layout=best, pauses=pauses, reason="the group before takes over" if best == local else "a rendezvous of all"
        )


def _with_shares(job: Job, pipelines: list[Pipeline]) -> Layout:
    if not pipelines:
        return Layout((), schedule=job.schedule)
    busiest = [
        max(sum(size for at, size in zip(one.groups, one.layers, strict=True) if at == group) for group in set(one.groups))
        for one in pipelines
    ]
    counts = proportional(job.micro_batches, [1.0 / layers for layers in busiest])
    dealt = (msgspec.structs.replace(one, micro_batches=count) for one, count in zip(pipelines, counts, strict=True) if count)
    return Layout(tuple(dealt), schedule=job.schedule)
