"""What the page tells, computed without a page."""

from __future__ import annotations

import pytest

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.scheduler.recovery import recover
from unskew.dashboard.panels.plan_view import draw, places
from unskew.dashboard.wording import ago, duration, ranges, signed_percent

FIRST = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8)
UNEVEN = plan_from_partition(
    plan_version=1, n_layers=8, schedule="1f1b", members=[(0, 1), (2, 3)], layers=[(5, 3), (4, 4)], micro_batches=(3, 5)
)


def test_plan_names_what_changed_and_leaves_the_dead_in_place() -> None:
    shown = places(UNEVEN, FIRST, {1: 0.5}, {})
    assert [place.was for place in shown[0]] == ["was 4 layers, 4 mb", "was 4 layers, 4 mb"]
    assert [place.was for place in shown[1]] == ["was 4 mb", "was 4 mb"]
    after = recover(FIRST, {3}, 1)
    shown = places(after, FIRST, {}, {3: FIRST.role_of[3]})
    assert [(place.role.rank, place.dead, place.micro_batches) for place in shown[1]] == [(2, False, 4), (3, True, 0)]
    assert {place.role.rank: place.rerouted_in for place in shown[0]} == {0: 0, 1: 4}
    drawn = draw(FIRST.recomputing({3}), after, {}, {})
    assert "new</span>" in drawn
    assert "was new" not in drawn
    assert drawn.count(", recomputes</span>") == 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (duration(812_400), "812 ms"),
        (duration(999_600), "1.00 s"),
        (duration(None), "–"),
        (ago(42), "42 s ago"),
        (ago(7_000), "117 min ago"),
        (signed_percent(-0.24), "−24 %"),
        (signed_percent(0.031), "+3.1 %"),
        (ranges([5, 0, 1, 2]), "0–2, 5"),
        (ranges([4, 5]), "4, 5"),
    ],
)
def test_numbers_as_words(found: str, expected: str) -> None:
    assert found == expected
