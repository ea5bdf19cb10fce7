"""By how much iterations end later of late: their level, and what comes again now and then, which is no level that moves."""

from __future__ import annotations

import msgspec
import pytest
from support.training.adaptation_loop import SITE, Loop, Telemetry, events, follow, healthy, in_trial, slow, train

from unskew.analytics.detector.options import SHARED_MACHINE
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.late_ends import LateEnds
from unskew.analytics.loop.site import AdaptationOptions
from unskew.analytics.predictor.retraining import RetrainingOptions
from unskew.collector.events import PlanScored, PredictorFitted


def longer_us(*series: float) -> float:
    """After a series of what iterations took longer."""
    ends = LateEnds()
    for iteration, more_us in enumerate(series):
        ends = ends.add(iteration, more_us)
    return ends.longer_us


@pytest.mark.parametrize(("before", "after"), [(0.0, 100.0), (100.0, 0.0)])
def test_a_level_that_moves_does_not_come_again(before: float, after: float) -> None:
    found = [longer_us(*[before] * 20, *[after] * k) for k in range(25)]
    assert min(found) >= 0.0
    assert max(found) <= 100.0
    assert found[5:] == [after] * 20


@pytest.mark.parametrize("level", [0.0, 100.0])
@pytest.mark.parametrize(("every", "mean"), [(5, 6.0), (10, 3.0), (25, 0.0)])
def test_what_comes_again_is_in_the_mean_where_it_came_twice(level: float, every: int, mean: float) -> None:
    series = [level + (30.0 if at % every == 0 else 0.0) for at in range(50)]
    assert all(longer_us(*series[:n]) == pytest.approx(level + mean) for n in range(25, 50))


@pytest.mark.parametrize("since", [12, 41])
def test_plans_are_weighed_with_the_end_that_iterations_had_before_them(since: int) -> None:
    """Iterations become 60 ms longer, and nothing is fitted for it: what is so before a plan comes the plan is promised with,
    what is so since then may be its own fault and counts against it. Iterations are judged as they should be either way."""

    def longer(iterations: Telemetry) -> Telemetry:
        for one in iterations:
            late = 60_000 if one.committed.iteration >= since else 0
            committed = msgspec.structs.replace(one.committed, measured_us=one.committed.measured_us + late)
            yield msgspec.structs.replace(one, committed=committed)

    scores = []
    for changed in (longer, lambda same: same):
        loop, truth = Loop(msgspec.structs.replace(SITE, detector=SHARED_MACHINE)), slow(3, 0.5, at=20)
        loop.now = Adaptation.begin(loop.now.site, AdaptationOptions(retraining=RetrainingOptions(drift=9.0)))
        plan = in_trial(loop, truth, changed)
        later = follow(loop, changed(train(truth, 22, plan=plan, first=40)), plan)
        scores += events(later, PlanScored)
    with_more, without = scores
    judged = [later[now].judged for now in range(41, 46)]
    assert all(one.measured_us == pytest.approx(one.predicted_us, rel=0.02) for one in judged)
    assert with_more.predicted_s is not None
    assert with_more.measured_s == pytest.approx(without.measured_s + 0.06, abs=1e-6)
    own_fault = 0.06 if since > 40 else 0.0
    assert with_more.predicted_s - without.predicted_s == pytest.approx(0.06 - own_fault, abs=1e-3)
    assert without.effect_s - with_more.effect_s == pytest.approx(own_fault, abs=1e-3)


def test_plans_are_weighed_with_what_comes_again_and_not_with_what_came_once() -> None:
    """Every tenth iteration takes 30 ms longer; one iteration took a second."""

    def disturbed(iterations: Telemetry) -> Telemetry:
        for one in iterations:
            late = {0: 30_000, 7: 1_000_000 * (one.committed.iteration == 27)}.get(one.committed.iteration % 10, 0)
            committed = msgspec.structs.replace(one.committed, measured_us=one.committed.measured_us + late)
            yield msgspec.structs.replace(one, committed=committed)

    promised = []
    for changed in (disturbed, lambda same: same):
        loop = Loop(SITE)
        steps = follow(loop, changed(train(slow(3, 0.5, at=32), 40)))
        promised += [step.proposal.predicted_us for step in steps.values() if step.proposal]
    with_more, without = promised
    assert 2 * 30_000 / 20 < with_more - without < 4 * 30_000 / 20  # the second counts for the once, too


def test_an_end_that_was_learned_while_the_run_started_up_is_learned_again_when_the_iterations_show_it() -> None:
    """The first ten iterations end 150 ms later than all that follow; chunks are as predicted throughout."""
    loop = Loop(SITE)
    slow_start = (
        msgspec.structs.replace(
            one, committed=msgspec.structs.replace(one.committed, measured_us=one.committed.measured_us + late)
        )
        for one in train(healthy, 60)
        for late in [150_000.0 if one.committed.iteration < 10 else 0.0]
    )
    steps = follow(loop, slow_start)
    first, second, *_ = events(steps, PredictorFitted)
    assert first.trigger == "warm-up"
    assert second.trigger.startswith("drift of the iteration of -")
    assert second.watermark < 40
    assert second.model["iteration_end_us"] == pytest.approx(20_000, abs=3_000)
    after = [step.judged for now, step in steps.items() if now > second.watermark]
    assert max(abs((one.predicted_us or 0) / one.measured_us - 1) for one in after) < 0.02


def test_what_comes_again_is_not_forgotten_where_the_predictor_is_fitted_anew() -> None:
    """Every tenth iteration takes 30 ms longer; the second fit is in force from iteration 55 on."""

    def disturbed(iterations: Telemetry) -> Telemetry:
        for one in iterations:
            late = 30_000 * (one.committed.iteration % 10 == 0)
            committed = msgspec.structs.replace(one.committed, measured_us=one.committed.measured_us + late)
            yield msgspec.structs.replace(one, committed=committed)

    loop = Loop(SITE)
    fits = events(follow(loop, disturbed(train(healthy, 56))), PredictorFitted)
    assert [fit.watermark for fit in fits] == [7, 55]
    assert loop.now.monitor.longer_us == pytest.approx(2 * 30_000 / 20, abs=300)  # chunks differ by a hundredth
