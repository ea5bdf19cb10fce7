"""A standstill that nobody can be named for: ranks get time to move before they are asked to regroup, and again after it."""

from __future__ import annotations

from unskew.analytics.health.liveness import RankLiveness
from unskew.runtime.control.watch import STANDSTILL_S, LivenessWatch


def test_ranks_that_waited_for_a_controller_are_not_asked_to_regroup_at_once_nor_again_and_again() -> None:
    watch = LivenessWatch()
    still = RankLiveness(rank=0, at_s=0.0, alive=True, heartbeat_age_s=0.0, stalled_s=95.0, activity="commit")
    asked = [second for second in range(200) if watch.regroup_reason(float(second), {0: still})]
    assert asked == [STANDSTILL_S, 2 * STANDSTILL_S, 3 * STANDSTILL_S]
