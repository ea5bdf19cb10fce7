"""ReCycle (SOSP'24, arXiv 2405.14009): the work of a dead group goes to its peers of the same stage in other replicas."""

from __future__ import annotations

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.layout import Layout, LayoutError, Move, Pipeline, dealt, healthy
from unskew.analytics.core.plan import split_evenly
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, moved_layers, regroup


def dead_groups(job: Job, dead: set[int]) -> set[tuple[int, int]]:
    """(replica, stage) of the TP groups that have lost a device."""
    return {job.home(device) for device in dead}


def rerouted(job: Job, lost: set[tuple[int, int]], *, micro_batches: list[int] | None = None) -> Layout:
    """The healthy layout without the `lost` groups: their micro-batches split evenly over the living peers of the stage.

    Raises `LayoutError` when a stage has no living peer.
    """
    whole = healthy(job)
    counts = micro_batches or [pipeline.micro_batches for pipeline in whole.pipelines]
    pipelines = tuple(
        Pipeline(
            pipeline.replica,
            tuple(() if (pipeline.replica, stage) in lost else group for stage, group in enumerate(pipeline.groups)),
            pipeline.layers,
            count,
        )
        for pipeline, count in zip(whole.pipelines, counts, strict=True)
    )
    moves: tuple[Move, ...] = ()
    for replica, stage in sorted(lost):
        data_parallel_peers = [peer for peer in range(job.dp) if (peer, stage) not in lost]
        if not data_parallel_peers:
            raise LayoutError(f"no replica of stage {stage} is left")
        shares = split_evenly(counts[replica], len(data_parallel_peers))
        moves += dealt(replica, stage, counts[replica], dict(zip(data_parallel_peers, shares, strict=True)))
    return Layout(pipelines, moves)


class RecyclePolicy(Policy):
    """As ResiHP runs it (section 8): the whole TP group of a dead device is dropped; no replica of a stage left = abort.

    Simplified: its MILP is replaced by an even split; weight gradients are not split off, so bubbles are filled by whole
    backwards; optimiser staggering is left out (it hides less than the optimiser's own time).
    """

    name = "recycle"

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        try:
            layout = rerouted(cluster.job, dead_groups(cluster.job, cluster.dead()))
        except LayoutError as error:
            return Reaction(layout=None, reason=str(error))
        if layout == cluster.layout:
            return Reaction(layout=layout)
        return Reaction(
            layout=layout, pauses=regroup(cluster.job, moved_layers(cluster.layout, layout)),
            reason="the work of lost groups goes to their peers",
        )  # fmt: skip
