"""What slow ranks that comparisons have named take of the time that no cause explains."""

from __future__ import annotations

import pytest

from unskew.analytics.core.outcome import UnexplainedTime
from unskew.analytics.loop.watched.sizing import without_named
from unskew.collector.events import Party, Verdict

SLOW, IN_OPTIMIZER = {"F": 0.5, "B": 0.5}, {"optimizer": 0.5}


def slow(rank: int, share: float, speed: dict[str, float], since: int = 0) -> Verdict:
    return Verdict(
        verdict=1 + rank, cause="slow_device", culprits=(Party(kind="device", rank=rank),), victims=(), since_iteration=since,
        at_iteration=since + 16, confidence=1.0, sentence="", speed=speed, evidence={"share_of_time": share},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("named", "known_since", "left"),
    [
        ([slow(1, 0.2, SLOW), slow(2, 0.2, SLOW)], {}, 0.2),  # at once: they hold up the same time
        ([slow(1, 0.1, SLOW), slow(2, 0.2, SLOW)], {}, 0.2),
        ([slow(1, 0.2, SLOW, 50)], {}, 0.3),
        ([slow(1, 0.2, SLOW, 50)], {1: 0}, 0.4),  # by its speed it is predicted from then on
        ([slow(1, 0.2, SLOW)], {1: 25}, 0.35),
        ([slow(1, 0.2, IN_OPTIMIZER)], {}, 0.4),  # has never been without a cause
    ],
)
def test_no_time_without_a_cause_is_explained_twice(named: list[Verdict], known_since: dict[int, int], left: float) -> None:
    found = without_named(UnexplainedTime(of_lost=0.8, of_measured=0.4), named, known_since, 99)
    assert (found.of_measured, found.of_lost) == (pytest.approx(left), pytest.approx(2 * left))
