"""Detection by times of workers, and the synthetic jobs of the detectors' bench."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.detector.cusum import raised, threshold
from unskew.analytics.lab.baselines.registry import METHODS
from unskew.analytics.lab.studies.detection import PROTECTED, SETTINGS, cost_of, run, synthetic_job, wilson
from unskew.analytics.lab.studies.noise import load_lengths, load_noise
from unskew.analytics.pipeline.schedule import build_schedule, evaluate

NOISE, LENGTHS = load_noise(), load_lengths("code")


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_protocols_jobs_in_small(setting: object) -> None:
    """Slowdowns of 1.1 and 1.3 are found in time by the Detector, and nobody else is accused."""
    chosen = next(s for s in SETTINGS if s == setting)
    for seed, factor in enumerate((1.1, 1.3, None)):
        job = synthetic_job(chosen, NOISE.seeds.tuning + 500 + seed, NOISE, LENGTHS, factor)
        (outing,) = run(job, [METHODS["unskew"]])
        assert (outing.false_alarms, outing.flagged, outing.named) == (0, 0, factor is not None)
        if outing.delay is not None and outing.onset_error is not None and outing.speed_error is not None:
            assert outing.delay <= (10 if factor == 1.1 else 4)
            assert abs(outing.onset_error) <= 2
            assert abs(outing.speed_error) < 0.05


def test_a_synthetic_job_is_what_it_says() -> None:
    setting = SETTINGS[0]
    job = synthetic_job(setting, 7, NOISE, LENGTHS, 1.5)
    same = synthetic_job(setting, 7, NOISE, LENGTHS, 1.5)
    assert np.array_equal(job.measured_us, same.measured_us)
    assert job.fault is not None
    assert PROTECTED <= job.fault.at < setting.iterations - PROTECTED
    assert all(0 < work.tokens <= setting.tokens for works in job.works for work in works)
    committed = job.committed(3)
    assert len(committed.chunks) == 2 * setting.pp * setting.dp * setting.micro_batches
    schedule, cost = build_schedule(job.plan), cost_of(setting)
    makespan = evaluate(schedule, job.chunk_us, cost.message_us).makespan_us
    assert np.allclose(job.measured_us, makespan + cost.iteration_end_us)
    assert job.probe(job.fault.at)([job.fault.rank])[job.fault.rank] > 1.3
    assert job.probe(job.fault.at - 1)([job.fault.rank])[job.fault.rank] < 1.2


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 0.1), st.floats(0.5, 3.0), st.floats(1e3, 1e9))
def test_the_threshold_gives_the_mean_time_between_false_alarms_that_was_asked_for(sigma: float, k: float, n: float) -> None:
    limit = threshold(sigma, k * sigma, n)
    b = limit / sigma + 1.166
    between = (np.exp(2 * k * b) - 2 * k * b - 1) / (2 * k * k)
    assert between >= 0.99 * n
    assert limit == pytest.approx(sigma) or between <= 1.01 * n


def test_the_thresholds_formula_holds_for_a_simulated_cusum() -> None:
    """400 tests on normal noise, k = 0.5, begun anew when they fire: asked for 300 iterations between alarms."""
    random = np.random.default_rng(5)
    limit, total, alarms = threshold(1.0, 0.5, 300.0), np.zeros(400), 0
    for _ in range(3000):
        total = np.maximum(0.0, total + random.normal(0, 1, 400) - 0.5)
        fired = total > limit
        alarms += int(fired.sum())
        total[fired] = 0.0
    assert 400 * 3000 / alarms == pytest.approx(300, rel=0.1)


def test_a_raised_threshold_keeps_what_is_asked_for_where_the_tail_is_heavy() -> None:
    """Excesses of which every tenth has a tail; asked for 300 iterations between alarms, which the given threshold misses."""
    random = np.random.default_rng(6)

    def over(*shape: int) -> np.ndarray:
        tail = np.where(random.random(shape) < 0.1, random.exponential(0.08, shape), 0.0)
        return np.asarray(np.minimum(random.normal(-0.06, 0.03, shape) + tail, 0.15))

    def between(limit: float) -> float:
        total, alarms = np.zeros(400), 0
        for _ in range(3000):
            total = np.maximum(0.0, total + over(400))
            alarms += int((total > limit).sum())
            total[total > limit] = 0.0
        return 400 * 3000 / alarms

    limit = raised(0.1, over(20_000), 0.15, 300.0)
    assert between(0.1) < 150
    assert 300 <= between(limit) < 3000
    assert raised(0.1, np.minimum(over(20_000), -0.01), 0.15, 300.0) == 0.1


def test_wilsons_interval() -> None:
    assert wilson(50, 100) == pytest.approx((0.404, 0.596), abs=1e-3)
    assert wilson(100, 100) == pytest.approx((0.963, 1.0), abs=1e-3)
