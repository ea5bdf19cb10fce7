"""ReCoVer (arXiv 2605.11215): the number of micro-batches per step is constant; survivors take up the work within the step.

The replica is the atom. `steady` and `boundary` are its versatile workload policy, to the digit (B.2.4).
"""

from __future__ import annotations

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import healthy
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.policies.base import ClusterView, Policy, Reaction
from unskew.analytics.policies.restart import whole_replicas


class MicroBatchShares(msgspec.Struct, frozen=True):
    """Who does how much: `majors` replicas with `each` micro-batches, one minor with `rest` (0 = none), `spares` with none."""

    each: int
    majors: int
    rest: int
    spares: int

    def excess(self, total: int, replicas: int) -> float:
        """How far the busiest replica is above ``total / replicas``.

        >>> round(steady(8192, 63, 128).excess(8192, 63), 3)
        0.007
        """
        return self.each * replicas / total - 1.0


def steady(total: int, replicas: int, least: int) -> MicroBatchShares:
    """The policy after a commit: ``G' = smallest G >= least`` with ``replicas x G' >= total``, as many full majors as fit.

    >>> steady(8192, 63, 128)
    MicroBatchShares(each=131, majors=62, rest=70, spares=0)
    """
    each = max(least, -(-total // replicas))
    majors, rest = divmod(total, each)
    return MicroBatchShares(each, majors, rest, replicas - majors - (rest > 0))


def boundary(total: int, replicas: int, held: int) -> tuple[int, int]:
    """In the failing step, `held` gradients with the survivors: (k extra micro-batches each, how many ranks zero the last).

    >>> boundary(8192, 63, 8064)
    (3, 61)
    """
    k = max(1, -(-(total - held) // replicas))
    return k, held + k * replicas - total


class RecoverPolicy(Policy):
    """Simplified: a step fails at gradient synchronisation with all local micro-batches done (the paper's worst place); bucket
    snapshots are free; a replica does not come back (the paper has no re-join); spares exist only by rounding and stay idle.
    """

    name = "recover"
    sees = frozenset({"failed", "maintenance"})

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        alive = whole_replicas(job, cluster.dead())
        running = [pipeline.replica for pipeline in cluster.layout.pipelines]
        alive = [replica for replica in alive if replica in running]
        if not alive:
            return Reaction(layout=None, reason="no replica is left")
        if len(alive) == len(running):
            return Reaction(layout=cluster.layout)
        shares = steady(job.micro_batches, len(alive), job.micro_batches // job.dp)
        held = sum(pipeline.micro_batches for pipeline in cluster.layout.pipelines if pipeline.replica in alive)
        k, _ = boundary(job.micro_batches, len(alive), held)
        counts = [shares.each] * shares.majors + [shares.rest] * (shares.rest > 0)
        whole = healthy(job).pipelines
        layout = Layout(
            tuple(
                Pipeline(replica, whole[replica].groups, whole[replica].layers, count)
                for replica, count in zip(alive, counts, strict=False)
            ),
            schedule=job.schedule,
        )
        extra_s = k * cluster.seconds(layout) / (shares.each + job.pp - 1)
        return Reaction(
            layout=layout, pauses=(("reconfigure", constant("recover_shrink_s")), ("redo", extra_s)), redo="none",
            reason=f"{shares.majors} replicas take {shares.each} micro-batches, the last {shares.rest}",
        )  # fmt: skip
