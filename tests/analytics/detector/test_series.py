"""Detection without chunks (times of whole jobs, times of workers), and the synthetic jobs of the detectors' bench."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.datasets import dataset

from unskew.analytics.detector.cusum import threshold
from unskew.analytics.detector.job_wide import JobWideOptions, judge
from unskew.analytics.detector.options import EMULATED
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.workers import judge_workers
from unskew.analytics.lab.baselines.registry import METHODS
from unskew.analytics.lab.studies.detection import PROTECTED, SETTINGS, cost_of, run, synthetic_job, wilson
from unskew.analytics.lab.studies.noise import load_lengths, load_noise
from unskew.analytics.pipeline.evaluator import evaluate
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.collector.events import Verdict, VerdictClosed

NOISE, LENGTHS = load_noise(), load_lengths("code")


def job_times(seed: int, n: int, sd: float = 0.03) -> Floats:
    random = np.random.default_rng([NOISE.seeds.tuning, seed])
    spikes = np.where(random.random(n) < 0.01, random.uniform(1.5, 3.4, n), 1.0)
    return 5e6 * np.exp(random.normal(0, sd, n)) * spikes


def test_a_job_that_is_slow_as_a_whole_is_said_to_be_and_its_end_too_but_nobody_is_named() -> None:
    times = job_times(1, 500)
    times[200:350] *= 1.15
    named, closed = judge(enumerate(times))
    assert isinstance(named, Verdict)
    assert isinstance(closed, VerdictClosed)
    assert (named.cause, named.culprits, named.evidence["scope"]) == ("unknown", (), "job")
    assert abs(named.since_iteration - 200) <= 3
    assert named.evidence["time_ratio"] == pytest.approx(1.15, abs=0.02)
    assert abs(closed.until_iteration - 350) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_job_with_spikes_and_a_storm_of_thirty_iterations_raises_nothing(seed: int) -> None:
    times = job_times(seed, 500)
    times[0] *= 52  # the first iteration pays for start-up
    times[300:330] *= 2.5
    assert judge(enumerate(times)) == []


def test_a_job_that_became_faster_is_judged_by_its_new_pace() -> None:
    times = job_times(2, 600)
    times[200:] *= 0.7
    times[400:] *= 1.2
    (named,) = judge(enumerate(times))
    assert isinstance(named, Verdict)
    assert abs(named.since_iteration - 400) <= 3


def test_public_series_of_healthy_jobs_raise_at_most_one_alarm_and_show_a_slowdown_put_into_them() -> None:
    """Every seventh MLPerf run; all of them in the bench."""
    steps = pl.read_parquet(dataset("mlperf-steptimes", "steps.parquet")).filter(pl.col("kind") == "train")
    runs = steps.drop_nulls("step_time_s").partition_by("run_id", maintain_order=True)[::7]
    found = []
    for rows in runs:
        times = 1e6 * rows["step_time_s"].to_numpy().astype(float)
        assert judge(enumerate(times)) == []
        at = len(times) - 60
        times[at:] *= 1.15
        found.append(any(abs(v.since_iteration - at) <= 20 for v in judge(enumerate(times)) if isinstance(v, Verdict)))
    assert np.mean(found) >= 0.95


def test_alibabas_straggling_worker_is_named_and_nobody_else() -> None:
    table = pl.read_parquet(dataset("alibaba-minibatch", "minibatch-jobs-1-3.parquet")).filter(pl.col("job") == 1)
    wide = table.pivot(on="worker", index="time", values="batch_time_norm").sort("time")
    times = wide.select(sorted((c for c in wide.columns if c != "time"), key=int)).to_numpy().astype(float)
    verdicts, _ = judge_workers(times, EMULATED, iterations=wide["time"].to_list())
    assert {v.culprits[0].rank for v in verdicts if isinstance(v, Verdict)} == {6}


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


def test_wilsons_interval() -> None:
    assert wilson(50, 100) == pytest.approx((0.404, 0.596), abs=1e-3)
    assert wilson(100, 100) == pytest.approx((0.963, 1.0), abs=1e-3)


def test_a_job_wide_past_shorter_than_asked_says_nothing() -> None:
    times = job_times(3, 100)
    times[10:] *= 1.5
    assert judge(enumerate(times), JobWideOptions(least_past=20)) == []
