"""The ladder of timeouts: ours climbs, and each rung that does not is named with what it must be."""

from __future__ import annotations

import msgspec
import pytest

from unskew.analytics.health.liveness import LivenessOptions
from unskew.analytics.health.timeouts import Timeout, too_early
from unskew.runtime.control.timeouts import ladder


def test_the_timeouts_of_a_run_climb() -> None:
    assert too_early(ladder(LivenessOptions())) == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stopped_s": 0.15}, "stopped_s is 0.15 s and must be at least 2 x the agent's status (0.1 s): 0.2 s"),
        ({"frozen_s": 0.3}, "frozen_s is 0.3 s and must be at least 3 x stopped_s (0.2 s): 0.6 s"),
        ({"hung_s": 90.0}, "start_s is 30 s and must be at least hung_s before chunk times are known (90 s): 90 s"),
    ],
)
def test_a_rung_that_comes_too_early_is_named(change: dict[str, float], named: str) -> None:
    assert named in too_early(ladder(msgspec.structs.replace(LivenessOptions(), **change)))


def test_equal_rungs_stand() -> None:
    assert too_early([Timeout("a", 1.0), Timeout("b", 1.0), Timeout("c", 3.0, factor=3)]) == ()
    assert too_early([]) == ()
