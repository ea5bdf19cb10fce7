"""A standstill that nobody can be named for: ranks get time to move before they are asked to regroup, and again after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unskew.analytics.health.liveness import RankLiveness
from unskew.runtime.control.watch import STANDSTILL_S, LivenessWatch


def test_ranks_that_waited_for_a_controller_are_not_asked_to_regroup_at_once_nor_again_and_again() -> None:
    watch = LivenessWatch()
    still = RankLiveness(rank=0, at_s=0.0, alive=True, heartbeat_age_s=0.0, stalled_s=95.0, activity="commit")
    asked = [second for second in range(200) if watch.regroup_reason(float(second), {0: still})]
    assert asked == [STANDSTILL_S, 2 * STANDSTILL_S, 3 * STANDSTILL_S]


@pytest.mark.parametrize(
    ("beat_s", "asked_s"),
    [(lambda now_s: now_s - 0.1, 1.0), (lambda _: 4.9, 10.0)],
    ids=["all have beaten since", "one has not, so it may have died"],
)
def test_a_break_is_not_taken_for_one_without_a_death_before_every_rank_has_beaten(
    beat_s: Callable[[float], float], asked_s: float
) -> None:
    """On a busy machine the word of a killed rank's end comes later than a second after the break that it caused."""
    watch = LivenessWatch()
    watch.broken(0, 5.0)
    asked = []
    for quarter in range(60):
        now_s = 5.0 + quarter / 4
        statuses = {
            rank: RankLiveness(
                rank=rank, at_s=now_s, alive=True, heartbeat_age_s=now_s - beat, stalled_s=0.0, activity="regroup"
            )
            for rank, beat in enumerate((now_s - 0.1, beat_s(now_s)))
        }
        if watch.regroup_reason(now_s, statuses):
            asked.append(now_s - 5.0)
            watch.aborted(1)
    assert asked == [asked_s]
