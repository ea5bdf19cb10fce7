"""What a live run would have named is logged when it changes, and not else."""

from __future__ import annotations

from unskew.analytics.core.outcome import Sight
from unskew.analytics.loop.detection_limit import PATIENCE, LimitState
from unskew.collector.events import DetectionLimit


def sees(slowdown: float | None) -> Sight:
    return Sight(scope="device", smallest_slowdown=slowdown, why="" if slowdown else "2 iterations are too few")


def test_only_news_of_what_is_seen_is_logged() -> None:
    state, logged = LimitState(), list[DetectionLimit]()
    for iteration, slowdown in enumerate([None, None, 1.4, 1.39, 1.38, 1.2, 1.18, 1.3]):
        state, news = state.judged(sees(slowdown), iteration)
        logged += news
    assert [(one.at_iteration, one.smallest_slowdown) for one in logged] == [(2, 1.4), (5, 1.2), (7, 1.3)]


def test_logs_that_stay_out_blind_until_an_iteration_is_judged_again() -> None:
    state, _ = LimitState().judged(sees(1.15), 0)
    blinded: list[DetectionLimit] = []
    for iteration in range(1, 3 * PATIENCE):
        state, news = state.passed_over(iteration)
        blinded += news
    assert [(one.at_iteration, one.smallest_slowdown) for one in blinded] == [(PATIENCE, None)]
    state, news = state.judged(sees(1.15), 99)
    assert [one.smallest_slowdown for one in news] == [1.15]
    assert LimitState().passed_over(0)[1] == [], "in warm-up nobody has claimed to see"
