"""none: the job as most launchers leave it. A death ends it; slow devices are borne."""

from __future__ import annotations

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.policies.base import ClusterView, Policy, Reaction


class NothingPolicy(Policy):
    """Source: the default of torch.distributed. Simplified: the collective's time-out is the only detector."""

    name = "none"
    sees = frozenset({"failed", "maintenance"})

    def delay_s(self, event: ClusterEvent, iteration_s: float) -> float:
        return constant("collective_timeout_s")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        if cluster.layout.devices & set(event.devices):
            return Reaction(layout=None, reason="a device is lost and nothing handles it")
        return Reaction(layout=cluster.layout)
