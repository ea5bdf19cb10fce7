"""unskew: the live Scheduler's joint planner, with a test whether a change is worth its cost."""

from __future__ import annotations

import math
from contextlib import suppress

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.joint.anew import plan_anew
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.resihp.progressive import plan_progressive
from unskew.analytics.policies.base import (
    FAIL_SLOW,
    ClusterView,
    Policy,
    Reaction,
    from_checkpoint,
    moved_layers,
    regroup,
    survives,
    wait,
)
from unskew.analytics.policies.planning import planned, working
from unskew.analytics.policies.recycle import dead_groups, rerouted

ANEW_GROUPS = 512
"""In jobs of more groups, where it takes seconds, survivors are laid out anew only where the joint planner has no plan."""


class UnskewPolicy(Policy):
    """Candidates: what runs, the joint plan, ResiHP's levels with measured TP efficiency, ReCycle's rerouting, and after a
    death all survivors laid out anew; all timed by the one evaluator. The fastest is taken when its gain over the expected life
    of the fault pays for the pause. When a layer has lost its last holder it starts from the checkpoint; when nothing can run
    the job waits, and starts as soon as something can.

    The expected life of a slow phase is the median of such phases, that of any other cause a repair's median: simpler than the
    live Scheduler's test (scheduler/cost_benefit.py), which weighs the age of the fault and the change back.
    `least_gain` is the hysteresis: smaller gains than the noise of an iteration are left alone.
    """

    name = "unskew"
    sees = FAIL_SLOW
    checkpoint_s = constant("checkpoint_interval_s")
    false_alarm_s = constant("resihp_false_alarm_s")
    false_alarms_per_hour = constant("resihp_false_alarms_per_job")
    slow_recall = constant("resihp_slow_recall")
    least_gain = constant("iteration_cv")

    def __init__(self, *, joint: bool = True, levels: bool = True, worth: bool = True):
        self._joint, self._levels, self._worth = joint, levels, worth

    def candidates(self, cluster: ClusterView) -> dict[str, Layout]:
        """Layouts by name that could run on what is left, the present one first."""
        job, found = cluster.job, {"what runs": cluster.layout}
        measured = planned(job, cluster.speeds, measured=True)
        if self._joint:
            with suppress(PlanError):
                found["joint"] = working(plan_joint(measured, compare=False).layout)
            with suppress(PlanError):
                if (cluster.speeds == 0.0).any() and (job.dp * job.pp <= ANEW_GROUPS or "joint" not in found):
                    found["laid out anew"] = working(plan_anew(measured).layout)
        with suppress(PlanError):
            if self._levels:
                found["three levels"] = working(plan_progressive(measured).layout)
                ideal = planned(job, cluster.speeds, measured=False)
                found["three levels, ideal TP"] = working(plan_progressive(ideal).layout)
        with suppress(PlanError):
            found["reroute"] = rerouted(job, dead_groups(job, cluster.dead()))
        return found

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job = cluster.job
        layouts = self.candidates(cluster)
        seconds = {name: cluster.seconds(layout) for name, layout in layouts.items()}
        now_s = seconds["what runs"]
        best = min(seconds, key=lambda name: seconds[name])
        if math.isinf(seconds[best]):
            return wait("no plan serves what is left")
        layout = layouts[best]
        if not survives(cluster):
            return from_checkpoint(layout)
        pauses = regroup(job, moved_layers(cluster.holding(), layout))
        if self._worth and not math.isinf(now_s):
            gain = 1.0 - seconds[best] / now_s
            life_s = constant("slow_median_s") if event.kind == "slowed" else constant("repair_median_s")
            if gain < self.least_gain or gain * life_s < pauses[0][1]:
                return Reaction(layout=cluster.layout, reason=f"keeps what runs: {best} gains {100 * gain:.1f} %")
        if layout == cluster.layout:
            return Reaction(layout=layout, reason="the plan stays")
        return Reaction(layout=layout, pauses=pauses, reason=f"{best}: {seconds[best]:.3f} s an iteration")
