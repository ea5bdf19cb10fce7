"""ReCycle (SOSP'24, arXiv 2405.14009): the work of a dead group goes to its peers of the same stage in other replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.layout import Layout, Move
from unskew.analytics.core.plan import PlanError, split_evenly
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, moved_layers, regroup

DECOUPLED = "zb-h1"
"""The schedule of decoupled backward passes: ReCycle's order is a MILP's, this one list scheduling's."""


def dead_groups(job: Job, dead: set[int]) -> set[tuple[int, int]]:
    """(replica, stage) of the TP groups that have lost a device."""
    return {job.home(device) for device in dead}


def rerouted(job: Job, lost: set[tuple[int, int]]) -> Layout:
    """The healthy layout without the `lost` groups: their micro-batches split evenly over the living peers of the stage, with
    the backward pass split, so that weights' gradients fill what would be idle.

    Raises `PlanError` when a stage has no living peer.
    """
    whole = healthy(job)
    pipelines = []
    for home in whole.pipelines:
        groups = tuple(() if (home.replica, stage) in lost else group for stage, group in enumerate(home.groups))
        pipelines.append(msgspec.structs.replace(home, groups=groups))
    moves: tuple[Move, ...] = ()
    for replica, stage in sorted(lost):
        data_parallel_peers = [peer for peer in range(job.dp) if (peer, stage) not in lost]
        if not data_parallel_peers:
            raise PlanError(f"no replica of stage {stage} is left")
        total = pipelines[replica].micro_batches
        shares = split_evenly(total, len(data_parallel_peers))
        moves += dealt(replica, stage, total, dict(zip(data_parallel_peers, shares, strict=True)))
    if not moves:
        return whole
    return Layout(tuple(pipelines), moves, DECOUPLED)


def dealt(home: int, stage: int, total: int, counts: Mapping[int, int]) -> tuple[Move, ...]:
    """Moves that hand ``sum(counts)`` of the home's `total` micro-batches to replicas (replica -> how many), spread evenly.

    >>> [(move.target, move.micro_batches) for move in dealt(2, 0, 8, {0: 2, 1: 2})]
    [(0, (1, 5)), (1, (3, 7))]
    """
    moving = sum(counts.values())
    places = [number for number in range(total) if (number + 1) * moving // total > number * moving // total]
    takers = sorted(((2 * number + 1) / (2 * share), replica) for replica, share in counts.items() for number in range(share))
    given: dict[int, list[int]] = defaultdict(list)
    for place, (_, replica) in zip(places, takers, strict=True):
        given[replica].append(place)
    return tuple(Move(stage, home, replica, tuple(numbers)) for replica, numbers in given.items())


def redealt(layout: Layout) -> Layout:
    """The same rerouting after the homes' micro-batches have changed: each lost stage's work evenly over the same peers."""
    homes = {pipeline.replica: pipeline.micro_batches for pipeline in layout.pipelines}
    peers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for move in layout.moves:
        peers[move.source, move.stage].append(move.target)
    moves: tuple[Move, ...] = ()
    for (home, stage), targets in peers.items():
        if home not in homes:  # nobody is left of it: its micro-batches have other homes now
            continue
        shares = dict(zip(targets, split_evenly(homes[home], len(targets)), strict=True))
        moves += dealt(home, stage, homes[home], shares)
    return msgspec.structs.replace(layout, moves=moves)


class RecyclePolicy(Policy):
    """As ResiHP runs it (section 8): the whole TP group of a dead device is dropped; no replica of a stage left = abort.

    As in its paper the backward pass is decoupled (section 4.2); with `staggered` so are the optimisers (4.3), which our ranks
    do not do. Simplified: its MILP is replaced by an even split and list scheduling, which knows how many layers stages have
    and not how fast they are.
    """

    def __init__(self, *, staggered: bool = False):
        self._staggered = staggered
        self.name = "recycle-staggered" if staggered else "recycle"

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        try:
            layout = rerouted(cluster.job, dead_groups(cluster.job, cluster.dead()))
        except PlanError as error:
            return Reaction(layout=None, reason=str(error))
        layout = msgspec.structs.replace(layout, staggered=self._staggered and bool(layout.moves))
        if layout == cluster.layout:
            return Reaction(layout=layout)
        return Reaction(
            layout=layout, pauses=regroup(cluster.job, moved_layers(cluster.holding(), layout)),
            reason="the work of lost groups goes to their peers",
        )  # fmt: skip
