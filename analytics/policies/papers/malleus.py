"""Malleus (SIGMOD'25, arXiv 2410.13333): groups by straggling rates, unequal pipelines, layers and data by two ILPs."""

from __future__ import annotations

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import healthy
from unskew.analytics.core.constants import constant
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.malleus import must_replan, plan_malleus, rates
from unskew.analytics.planners.problem import working
from unskew.analytics.policies.base import FAIL_SLOW, ClusterView, Policy, Reaction, go_over
from unskew.analytics.policies.planning import planned, with_ends
from unskew.analytics.policies.restart import restarted


class MalleusPolicy(Policy):
    """Simplified: planning beside training costs nothing but the pause of the switch; a death is a rate without end, which the
    paper's code does not treat. Re-plans only when a rate moved by 0.3.
    """

    name = "malleus"
    sees = FAIL_SLOW
    checkpoint_s = constant("checkpoint_interval_s")
    slow_recall = constant("greyhound_slow_recall")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        used = np.zeros(job.devices, dtype=np.bool_)
        used[list(cluster.layout.devices)] = True
        touched = np.ones(job.devices)
        touched[list(event.devices)] = cluster.speeds[list(event.devices)]
        lost = bool(((cluster.speeds == 0.0) & used).any())
        moved = must_replan(rates(np.ones(job.devices)), rates(touched)) or event.kind in {"joined", "recovered"}
        if not lost and not moved:
            return Reaction(layout=cluster.layout, redo="none", reason="no rate moved by 0.3")
        if (cluster.speeds >= 1.0).all():
            layout = healthy(job)
        else:
            try:
                measured = with_ends(planned(job, cluster.speeds, measured=True), job)
                layout = working(measured, plan_malleus(measured).layout)
            except PlanError as error:
                return restarted(cluster, str(error))
        return go_over(cluster, layout, "groups, layers and micro-batches by rates")
