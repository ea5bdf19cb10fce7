"""ResiHP (arXiv 2605.06374): TP exclusion, PP repartition, DP migration, in this order, on every failure report."""

from __future__ import annotations

from collections.abc import Set

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.problem import Level, working
from unskew.analytics.planners.resihp.progressive import ALL_LEVELS
from unskew.analytics.policies.base import FAIL_SLOW, ClusterView, Policy, Reaction, go_over
from unskew.analytics.policies.planning import planned, three_levels
from unskew.analytics.policies.restart import restarted


class ResihpPolicy(Policy):
    """The three levels are analytics/planners/resihp/progressive.py; `levels` switches some off, as its figure 11 does.

    Simplified: slow links are only timed, not planned for; validation costs its measured seconds; re-join undoes the shrink at
    once, and where no plan is left the whole replicas restart from the checkpoint, or the job waits (the paper states neither).
    """

    sees = FAIL_SLOW
    checkpoint_s = constant("checkpoint_interval_s")
    false_alarm_s = constant("resihp_false_alarm_s")
    false_alarms_per_hour = constant("resihp_false_alarms_per_job")
    slow_recall = constant("resihp_slow_recall")

    def __init__(self, levels: Set[Level] = ALL_LEVELS):
        self._levels = frozenset(levels)
        chosen = () if self._levels == ALL_LEVELS else (one for one in ("tp", "pp", "dp") if one in levels)
        self.name = "-".join(["resihp", *chosen])

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        try:
            estimated = planned(cluster.job, cluster.speeds, measured=False)
            decided = three_levels(cluster.job, cluster.speeds, measured=False, levels=self._levels)
            layout = working(estimated, decided.layout)
        except PlanError as error:
            return restarted(cluster, str(error))
        levels = [f"TP: {decided.tp} groups"] if decided.tp else []
        if decided.pp and decided.pp.after != decided.pp.before:
            levels.append(f"PP: {decided.pp.after}")
        if decided.dp:
            levels.append(f"DP: {len(decided.dp)} moves")
        return go_over(cluster, layout, "; ".join(levels) or "back to the first plan")
