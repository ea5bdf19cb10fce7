"""FT-HSDP (Meta, arXiv 2602.00277): a replica is the unit of failure; the others go on with a smaller batch until it is back.

`closed_form` is the paper's efficiency model (B.1.6); `FtHsdpPolicy` plays it in time, so that failures may overlap.
"""

from __future__ import annotations

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import uniform
from unskew.analytics.core.constants import constant
from unskew.analytics.core.plan import PlanError
from unskew.analytics.policies.base import ClusterView, Pauses, Policy, Reaction
from unskew.analytics.policies.restart import whole_replicas


def closed_form(mtbf_s: float, down_s: float, replicas: int, stall_s: float) -> tuple[float, float]:
    """(synchronous, FT-HSDP) effective training time with one failure every `mtbf_s` of wall clock.

    Synchronous ``(M - D) / M``; FT-HSDP ``(F + G (R - 1) / R) / M`` with ``G = D - S`` and ``F = M - S - G``.

    >>> [round(100 * share, 1) for share in closed_form(1080, 600, 12, 180)]
    [44.4, 80.1]
    """
    degraded = max(0.0, down_s - stall_s)
    full = mtbf_s - stall_s - degraded
    return (mtbf_s - down_s) / mtbf_s, (full + degraded * (replicas - 1) / replicas) / mtbf_s


class FtHsdpPolicy(Policy):
    """A failure stalls all replicas for S, then the rest trains without the dead one; it is back D after the failure.

    Simplified: quorum and commit cost nothing in steady state, as measured at 98K; the replacement is always there (the paper
    gives no limit to spares); a lost step is part of S. `rejoin_s`: a second stall when the replica comes back.
    """

    name = "ft-hsdp"
    sees = frozenset({"failed", "maintenance", "joined"})

    def __init__(self, stall_s: float | None = None, down_s: float | None = None, rejoin_s: float = 0.0):
        self._stall_s = constant("ft_hsdp_stall_s") if stall_s is None else stall_s
        self._down_s = constant("ft_hsdp_sync_down_s") if down_s is None else down_s
        self._rejoin_s = rejoin_s

    def delay_s(self, event: ClusterEvent, iteration_s: float) -> float:
        return 0.0  # S contains the collective's time-out

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        alive = whole_replicas(job, cluster.dead())
        if event.kind != "joined":  # who is back comes in with its own event
            running = {pipeline.replica for pipeline in cluster.layout.pipelines}
            alive = [replica for replica in alive if replica in running]
        back = ClusterEvent(kind="joined", at_s=cluster.now_s + self._down_s, devices=event.devices, why="replaced")
        if event.kind != "joined" and cluster.layout.devices.isdisjoint(event.devices):
            return Reaction(layout=cluster.layout, redo="none", later=(back,), reason="its replica was away already")
        try:
            layout = uniform(job, alive, micro_batches=job.micro_batches // job.dp * len(alive))
        except PlanError:
            later = (back,) if event.kind == "failed" else ()
            return Reaction(layout=cluster.layout, redo="none", later=later, reason="waits: every replica is hurt")
        if event.kind == "joined":
            pauses: Pauses = (("stall", self._rejoin_s),) if layout != cluster.layout else ()
            return Reaction(layout=layout, pauses=pauses, redo="none", reason="a replica is back")
        return Reaction(
            layout=layout, pauses=(("stall", self._stall_s),), redo="none", later=(back,),
            reason=f"{len(alive)} of {job.dp} replicas go on with their own batches",
        )  # fmt: skip
