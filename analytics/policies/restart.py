"""checkpoint-restart: stop, replace or leave out, load the last checkpoint, start again."""

from __future__ import annotations

import math
from typing import Literal

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, uniform
from unskew.analytics.core.constants import constant
from unskew.analytics.core.plan import PlanError
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, wait


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Young's interval, which loses least to writing and redoing: ``sqrt(2 x stall x mean time between failures)``."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


class RestartPolicy(Policy):
    """Source: Megatron-LM with a launcher; times of FT-HSDP (B.1.5, B.1.6).

    With spare nodes the same layout starts again, otherwise the replicas without a dead device carry the whole batch; a device
    that joins is used from the next restart on. Simplified: only whole replicas are left out; fail-slow is not seen.
    """

    name = "checkpoint-restart"
    takes_spares = True

    def __init__(
        self,
        checkpoint_s: float | None = constant("checkpoint_interval_s"),
        restart_s: float | None = None,
        *,
        detect_s: float | None = None,
        loses_work: bool = True,
    ):
        """`loses_work` False: the convention of papers that count only the standstill."""
        self._redo: Literal["none", "checkpoint"] = "checkpoint" if loses_work else "none"
        self.checkpoint_s = checkpoint_s
        self._restart_s = constant("restart_s") if restart_s is None else restart_s
        self._detect_s = constant("restart_detect_s") if detect_s is None else detect_s

    def delay_s(self, event: ClusterEvent, iteration_s: float) -> float:
        return 0.0 if event.kind == "maintenance" else self._detect_s

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job, dead = cluster.job, cluster.dead()
        if cluster.unhurt():
            return Reaction(layout=cluster.layout, reason="what runs lost nobody")
        nodes = {job.node(device) for device in dead}
        if nodes and len(nodes) <= cluster.spares:
            return Reaction(
                layout=self.start(job), pauses=(("restart", self._restart_s),), redo=self._redo, spares=len(nodes),
                replaced=tuple(sorted(dead)), reason=f"{len(nodes)} node(s) replaced by spares",
            )  # fmt: skip
        return restarted(cluster, restart_s=self._restart_s, redo=self._redo)


def restarted(
    cluster: ClusterView, why: str = "", *, restart_s: float | None = None, redo: Literal["none", "checkpoint"] = "checkpoint"
) -> Reaction:
    """The whole replicas start again from the checkpoint, or the job waits for one; the usual practice, and so the answer of a
    policy whose paper has none (`why`: what its own planner said). What runs unhurt runs on: who joins is used from the next
    restart on.
    """
    if cluster.unhurt():
        return Reaction(layout=cluster.layout, reason=why)
    job = cluster.job
    try:
        layout = uniform(job, whole_replicas(job, cluster.dead()))
    except PlanError:
        return wait(why or "no whole replica is left", redo=redo)
    seconds = constant("restart_s") if restart_s is None else restart_s
    reason = f"{len(layout.pipelines)} whole replicas are left"
    return Reaction(
        layout=layout, pauses=(("restart", seconds),), redo=redo, reason=f"{why}; {reason} and start again" if why else reason
    )


def whole_replicas(job: Job, dead: set[int]) -> list[int]:
    """Replicas without a dead device."""
    hurt = {job.home(device)[0] for device in dead}
    return [replica for replica in range(job.dp) if replica not in hurt]
