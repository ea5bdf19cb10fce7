"""What a policy is: a pure answer to what happened. `react(cluster, event) -> Reaction` (a plan record, or stop)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from unskew.analytics.cluster.accounting import Lost
from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.cluster.timing import Links, Speeds, iteration_s
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout


class ClusterView(msgspec.Struct, frozen=True):
    """What a policy knows when it is asked: `speeds` are estimated, `layout` is what runs, `spares` are whole nodes.

    `held`: the layout by which layers lie in memory while a change to `layout` is under way (None: `layout` itself); `WAITING`
    during a restart. `ends_s`: when the job is to end.
    """

    job: Job
    now_s: float
    speeds: Speeds
    links: Links
    layout: Layout
    spares: int = 0
    slow_since_s: Mapping[int, float] = {}
    held: Layout | None = None
    ends_s: float = math.inf

    def seconds(self, layout: Layout) -> float:
        """Estimated iteration time under `layout`."""
        return iteration_s(self.job, layout, self.speeds, self.links)

    def dead(self) -> set[int]:
        return {int(device) for device in np.flatnonzero(self.speeds == 0.0)}

    def holding(self) -> Layout:
        """The layout by which layers lie in memory now."""
        return self.layout if self.held is None else self.held

    def unhurt(self) -> bool:
        """Whether a layout is in force and none of its devices is dead."""
        return bool(self.layout.pipelines) and bool((self.speeds[self.layout.members] > 0.0).all())


WAITING = Layout(())
"""Nobody works and nobody holds a layer: the job waits for devices, to start again from the checkpoint."""

Pauses = tuple[tuple[Lost, float], ...]
"""(cause, seconds) of standstill, in their order."""


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """The plan record: run `layout` after the pauses; `layout` None = the job stops for good, `WAITING` = it waits.

    `redo`: what is thrown away. none = in-flight work is kept, iteration = the iteration is redone, checkpoint = back to the
    last checkpoint. `spares`: nodes taken from the pool; `replaced`: the slots that are healthy hardware when the pauses end.
    `later`: happenings that the policy itself sets off (a replacement that joins, a review).
    """

    layout: Layout | None
    pauses: Pauses = ()
    redo: Literal["none", "iteration", "checkpoint"] = "iteration"
    spares: int = 0
    replaced: tuple[int, ...] = ()
    later: tuple[ClusterEvent, ...] = ()
    reason: str = ""


class Policy(ABC):
    """`sees`: the kinds of cluster event that it observes; a delay of its own for each; `checkpoint_s`: the interval, None
    = none.

    `takes_spares`: it puts spare nodes in the place of lost ones. `most_devices`: for larger jobs it does not decide in time.
    `false_alarms_per_hour` x `false_alarm_s` is time that its detector wastes (published per job of unknown length: an hour is
    assumed); `slow_recall` the share of slow phases it finds.
    """

    name: str
    sees: frozenset[str] = frozenset({"failed", "joined", "maintenance"})
    checkpoint_s: float | None = None
    false_alarms_per_hour: float = 0.0
    false_alarm_s: float = 0.0
    slow_recall: float = 1.0
    takes_spares: bool = False
    most_devices: int | None = None

    def start(self, job: Job) -> Layout:
        """The layout that the job starts with."""
        return healthy(job)

    def delay_s(self, event: ClusterEvent, iteration_s: float) -> float:
        """From the event to the reaction: heartbeats for a death, change points and validation for a slow phase."""
        if event.kind in {"slowed", "link_slowed"}:
            return constant("slow_detect_iterations") * iteration_s + constant("slow_locate_s")
        if event.kind in {"recovered", "link_recovered"}:
            return constant("slow_detect_iterations") * iteration_s
        return 0.0 if event.kind == "maintenance" else constant("heartbeat_s")

    @abstractmethod
    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        """What to do; never looks at anything but its arguments."""


FAIL_SLOW = frozenset({"failed", "joined", "maintenance", "slowed", "recovered", "link_slowed", "link_recovered"})


def regroup(job: Job, moved_layers: int) -> Pauses:
    """The pause of a change without restart: planning, new groups, and copying `moved_layers` layers to their new holders."""
    layer_bytes = job.parameters / job.n_layers * constant("bytes_per_parameter") / job.tp
    copied = moved_layers * layer_bytes / constant("layer_copy_bytes_per_s")
    return (("reconfigure", constant("regroup_s") + constant("planning_s") + copied),)


def survives(cluster: ClusterView) -> bool:
    """Whether every layer is still held by a group that lost nobody, or will be when a restart under way is over."""
    if cluster.unhurt():
        return True
    held: set[int] = set()
    dead = cluster.dead()
    for group, layers in _held(cluster.holding()).items():
        if dead.isdisjoint(group):
            held |= layers
    return len(held) == cluster.job.n_layers


def from_checkpoint(layout: Layout) -> Reaction:
    """`layout` from the last checkpoint: some layer's state is lost with its last holder."""
    pauses: Pauses = (("restart", constant("restart_s")),)
    reason = "a layer has lost its last holder: back to the checkpoint"
    return Reaction(layout=layout, pauses=pauses, redo="checkpoint", reason=reason)


def wait(reason: str, *, redo: Literal["none", "checkpoint"] = "checkpoint") -> Reaction:
    """Until devices are back that the model fits on; then the job starts again from the checkpoint."""
    return Reaction(layout=WAITING, redo=redo, reason=f"waits: {reason}")


def go_over(cluster: ClusterView, layout: Layout, reason: str) -> Reaction:
    """To `layout` without restart, or from the checkpoint where a layer has lost its last holder."""
    if not survives(cluster):
        return from_checkpoint(layout)
    if layout == cluster.layout:
        return Reaction(layout=layout, reason="the plan stays")
    return Reaction(layout=layout, pauses=regroup(cluster.job, moved_layers(cluster.holding(), layout)), reason=reason)


def with_spares(cluster: ClusterView) -> tuple[ClusterView, int, tuple[int, ...]]:
    """(the cluster with spare nodes in the place of those that lost most devices, how many, the slots that they serve).

    What else lived on such a node moves with it: its groups have to receive their layers again.
    """
    job, lost = cluster.job, Counter(cluster.job.node(device) for device in sorted(cluster.dead()))
    nodes = {node for node, _ in lost.most_common(cluster.spares)}
    slots = tuple(device for device in sorted(cluster.dead()) if job.node(device) in nodes)
    speeds = cluster.speeds.copy()
    speeds[list(slots)] = 1.0
    held = [
        msgspec.structs.replace(one, groups=tuple(() if nodes & set(map(job.node, group)) else group for group in one.groups))
        for one in cluster.holding().pipelines
    ]
    return msgspec.structs.replace(cluster, speeds=speeds, held=Layout(tuple(held))), len(nodes), slots


def moved_layers(before: Layout, after: Layout) -> int:
    """Most layers that one TP group has to receive: those that it works on and did not hold before."""
    held = _held(before)
    return max((len(layers - held.get(group, set())) for group, layers in _held(after).items()), default=0)


def _held(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    held: dict[tuple[int, ...], set[int]] = {}
    for pipeline in layout.pipelines:
        first = 0
        for group, n in zip(pipeline.groups, pipeline.layers, strict=True):
            if group:
                held.setdefault(group, set()).update(range(first, first + n))
            first += n
    return held
