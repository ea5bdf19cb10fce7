"""What a live run would have named is logged when it changes, and not else."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.outcome import Sight, UnexplainedTime
from unskew.analytics.loop.detection_limit import IN_VAIN, LASTS, PATIENCE, LimitState
from unskew.collector.events import DetectionLimit


def sees(slowdown: float | None, of_job: float | None = 1.05) -> list[Sight]:
    device = Sight(scope="device", smallest_slowdown=slowdown, why="" if slowdown else "2 iterations are too few")
    return [device, Sight(scope="job", smallest_slowdown=of_job, why="" if of_job else "too young")]


def test_only_news_of_what_is_seen_is_logged() -> None:
    state, logged = LimitState(), list[DetectionLimit]()
    for iteration, slowdown in enumerate([None, None, 1.4, 1.39, 1.38, *[1.2] * LASTS, 1.18, 1.3]):
        state, news = state.judged(sees(slowdown), iteration)
        logged += news
    assert [(one.at_iteration, one.smallest_slowdown) for one in logged] == [(2, 1.4), (4 + LASTS, 1.2), (6 + LASTS, 1.3)]


def test_logs_that_stay_out_blind_until_most_iterations_are_judged_again() -> None:
    state, _ = LimitState().judged(sees(1.15), 0)
    logged: list[DetectionLimit] = []
    for iteration in range(1, 20 * PATIENCE + LASTS):
        late = iteration <= 2 * PATIENCE
        state, news = state.passed_over(iteration) if late else state.judged(sees(1.15), iteration)
        logged += news
    seen = [(one.at_iteration, one.smallest_slowdown) for one in logged]
    assert seen == [*((at * PATIENCE, None) for at in (1, 5, 10)), (20 * PATIENCE - 2 + LASTS, 1.15)]
    whys = [one.why for one in logged[:3]]
    assert whys[1] == whys[2].replace("51", "26") != whys[0], "a reason that has changed is said, less and less often"
    assert LimitState().passed_over(0)[1] == [], "in warm-up nobody has claimed to see"


def test_devices_alone_are_not_the_whole() -> None:
    """What is not seen of the whole job, or lost for no cause, is no calm; that it never was is said once warm-up is over."""
    state, logged = LimitState(), list[DetectionLimit]()
    for iteration in range(IN_VAIN + 5):
        state, news = state.judged(sees(1.15, None), iteration)
        logged += news
    assert [(one.smallest_slowdown, one.why) for one in logged] == [(None, "too young")]
    for iteration in range(IN_VAIN + 5, IN_VAIN + 4 + LASTS):
        state, news = state.judged(sees(1.15, 1.2), iteration)
        assert not news
    state, (well,) = state.judged(sees(1.15, 1.2), 40)
    assert (well.smallest_slowdown, "of the whole job by 20 %" in well.why) == (1.15, True)
    assert state.judged(sees(1.15, 1.19), 41)[1] == []
    assert state.judged(sees(1.15, 1.3), 41)[1] != [], "less is said at once"
    (blind,) = state.judged(sees(1.15, 1.2), 41, UnexplainedTime(of_measured=0.2))[1]
    assert (blind.smallest_slowdown, "no cause explains" in blind.why) == (None, True)


def test_logs_that_come_too_late_now_and_then_blind_too() -> None:
    state, _ = LimitState().judged(sees(1.15), 0)
    logged: list[DetectionLimit] = []
    for iteration in range(1, 40):
        state, news = state.passed_over(iteration) if iteration % 4 == 0 else state.judged(sees(1.15), iteration)
        logged += news
    assert [one.smallest_slowdown for one in logged] == [None]
    assert logged[0].why == "the log of 5 of 22 iterations came too late or not at all"


def test_what_is_lost_from_sight_is_said_at_once_and_seen_again_when_it_lasts_or_the_run_ends() -> None:
    """Of a job with a slow rank 11 changes were told in 120 iterations."""
    state, logged = LimitState(), list[DetectionLimit]()
    for iteration in range(120):
        of_job = 2.5 if iteration % 6 < 2 else 1.9
        state, news = state.judged(sees(1.15, of_job), iteration)
        logged += news
    assert [(one.at_iteration, one.smallest_slowdown) for one in logged] == [(2, 1.15), (6, None)]
    assert state.ended()[1][0].smallest_slowdown == 1.15, "as it was seen at last"
    state, _ = state.judged(sees(1.15, 2.5), 120)
    assert state.ended()[1] == []


def test_that_devices_are_seen_is_logged_where_the_whole_job_is_not() -> None:
    def noisy(slowdown: float | None) -> list[Sight]:
        device, job = sees(slowdown, 3.0)
        return [msgspec.structs.replace(device, compares=True), job]

    state, _ = LimitState().judged(sees(1.15), 0)
    state, (limit,) = state.judged(noisy(1.2), 1)
    assert (limit.smallest_slowdown, limit.of_devices) == (None, 1.2)
    hidden = UnexplainedTime(of_measured=0.2)
    for found in (state.judged(noisy(None), 2), state.judged(noisy(1.2), 2, hidden), state.judged(sees(1.2, 3.0), 2)):
        (limit,) = found[1]
        assert (limit.smallest_slowdown, limit.of_devices) == (None, None)
    (limit,) = state.judged(noisy(1.4), 2)[1]
    assert limit.of_devices == 1.4


def test_only_what_is_seen_in_a_row_is_seen_again() -> None:
    """Devices and the whole job by turns, or with a log that came too late between, is no lasting sight of both."""
    first, _ = LimitState().judged(sees(1.15), 0)
    blind, (lost,) = first.judged(sees(None), 1)
    assert lost.of_devices is None
    state = blind
    devices = [msgspec.structs.replace(sees(1.2)[0], compares=True), sees(1.2, 3.0)[1]]
    for iteration in range(2, 2 + 3 * LASTS):
        state, news = state.judged(devices if iteration % 2 else sees(1.15), iteration)
        assert not news
    state = blind
    for iteration in range(2, LASTS + 1):
        state, news = state.judged(sees(1.15), iteration)
        assert not news
    state, _ = state.passed_over(LASTS + 1)
    assert state.ended()[1] == [], "the last iteration was not judged"
    assert state.judged(sees(1.15), LASTS + 2)[1] == []
