"""joint: the joint planner with powers that no rank has, and a test whether a change is worth its cost; simulated only."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout
from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.joint.anew import plan_anew
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.problem import working
from unskew.analytics.policies.base import (
    FAIL_SLOW,
    ClusterView,
    Pauses,
    Policy,
    Reaction,
    from_checkpoint,
    moved_layers,
    regroup,
    survives,
    wait,
    with_spares,
)
from unskew.analytics.policies.papers.recycle import dead_groups, rerouted
from unskew.analytics.policies.planning import planned, three_levels

ANEW_GROUPS = 512
"""In jobs of more groups, where it takes seconds, all are laid out anew only where the joint planner has no plan."""


class JointPolicy(Policy):
    """Candidates: what runs, the joint plan, ResiHP's levels with measured TP efficiency, ReCycle's rerouting, and all that is
    left laid out anew; all timed by the one evaluator. The fastest is taken when its gain over the expected life of the fault
    pays for the pause. Spare nodes serve in the place of lost ones. When a layer has lost its last holder it starts from the
    checkpoint; when nothing can run the job waits, and starts as soon as something can.

    The expected life of a slow phase is the median of such phases, that of any other cause a repair's median: simpler than the
    live Scheduler's test (scheduler/cost_benefit.py), which weighs the age of the fault and the change back.
    `least_gain` is the hysteresis: smaller gains than the noise of an iteration are left alone while a device is slow or dead,
    because their estimates are rough; of a sound job they are taken, they last.
    """

    name = "joint"
    takes_spares = True
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
                found["joint"] = working(measured, plan_joint(measured, compare=False).layout)
            with suppress(PlanError):
                if (cluster.speeds < 1.0).any() and (job.dp * job.pp <= ANEW_GROUPS or "joint" not in found):
                    found["laid out anew"] = working(measured, plan_anew(measured).layout)
        with suppress(PlanError):
            if self._levels:
                found["three levels"] = working(measured, three_levels(job, cluster.speeds, measured=True).layout)
                ideal = planned(job, cluster.speeds, measured=False)
                found["three levels, ideal TP"] = working(ideal, three_levels(job, cluster.speeds, measured=False).layout)
        with suppress(PlanError):
            found["reroute"] = working(measured, rerouted(job, dead_groups(job, cluster.dead())))
        return found

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        restored, nodes, slots = with_spares(cluster)
        layouts = self.candidates(restored)
        seconds = {name: restored.seconds(layout) for name, layout in layouts.items()}
        best = min(seconds, key=lambda name: seconds[name])
        if math.isinf(seconds[best]):
            return wait("no plan serves what is left")
        if not survives(cluster):
            return msgspec.structs.replace(from_checkpoint(layouts[best]), spares=nodes, replaced=slots)

        def pauses(layout: Layout) -> Pauses:
            if layout == cluster.layout and layout.devices.isdisjoint(slots):
                return ()
            return regroup(cluster.job, moved_layers(restored.holding(), layout))

        name, reason = best, f"{best}: {seconds[best]:.3f} s an iteration"
        if self._worth and not math.isinf(now_s := seconds["what runs"]):
            gain = 1.0 - seconds[best] / now_s
            life_s = constant("slow_median_s") if event.kind == "slowed" else constant("repair_median_s")
            longer_s = _seconds(pauses(layouts[best])) - _seconds(pauses(cluster.layout))
            least_gain = self.least_gain if (restored.speeds < 1.0).any() else 0.0
            if gain <= least_gain or gain * life_s < longer_s:
                name, reason = "what runs", f"keeps what runs: {best} gains {100 * gain:.1f} %"
        layout = layouts[name]
        return Reaction(layout=layout, pauses=pauses(layout), spares=nodes, replaced=slots, reason=reason)


def _seconds(pauses: Pauses) -> float:
    return sum(seconds for _, seconds in pauses)
