"""Adaptra / PipeMorph (arXiv 2504.19232): extra warm-up forwards absorb slow links; slow compute is only reordered."""

from __future__ import annotations

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.policies.base import ClusterView, Policy, Reaction


class AdaptraPolicy(Policy):
    """Fail-stop is not handled: the job stops. In the simulator it does nothing else: a layout has the order of the evaluator,
    into which extra warm-up forwards cannot be put, so slow links are borne as by any policy; messages block no kernels here,
    so the CPU-side RDMA path brings nothing; slow compute is borne as it is.
    """

    name = "adaptra"
    sees = frozenset({"failed", "maintenance", "slowed", "recovered", "link_slowed", "link_recovered"})
    slow_recall = constant("greyhound_slow_recall")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        if cluster.dead() & cluster.layout.devices:
            return Reaction(layout=None, reason="a device is dead: Adaptra answers fail-slow only")
        return Reaction(layout=cluster.layout, redo="none", reason="order only")
