"""The detectors on real series of others, and what judging an iteration costs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
from support import datasets
from support.held_bytes import held_bytes
from support.traces.noisy_series import megatron, mlperf

from unskew.analytics.detector.detector import Detector
from unskew.analytics.detector.job_wide import judge
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.workers import RankTimes, judge_workers
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.lab.studies.detection import JobSetting, cost_of, synthetic_job
from unskew.analytics.lab.studies.noise import load_lengths, load_noise
from unskew.benchmarks.detector.phases import judged
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

INJECTED = 1.15
ROOM = 60  # iterations that are left after an injected slowdown, at least
FALSE_BEFORE = 0  # of what the test before this one named, by the same questions (phases.py)
LARGE = JobSetting(pp=8, tokens=8_192, micro_batches=8, hidden=4_096, dp=32, iterations=40)
LONG = JobSetting(pp=4, tokens=8_192, micro_batches=4, hidden=4_096, iterations=400)


def figures(_bench: Bench) -> list[Figure]:
    return [*job_wide(), *workers(), *cost_of_judging()]


def job_wide() -> list[Figure]:
    """MLPerf Training and Megatron-LM: episodes as they are, and slowdowns put into the same series."""
    names = (
        "MLPerf and Megatron series: episodes named that are phases of their own",
        "MLPerf and Megatron series: false alarms, the series' own noise or its work",
        "MLPerf and Megatron series: of these, stretches in which nothing was slow",
        f"MLPerf and Megatron series: job-wide slowdowns of {INJECTED:g} found",
    )
    series = [*mlperf(), *megatron()]
    if not series:
        note = "data sets mlperf-steptimes and megatron-iteration-times are absent: set UNSKEW_DATASETS"
        return [
            figure(names[0], None, "", better="higher", note=note),
            figure(names[1], None, "", bar=FALSE_BEFORE, better="lower", note=note),
            figure(names[2], None, "", better="lower", note=note),
            figure(names[3], None, "%", bar=95, better="higher", note=note),
        ]
    seed = load_noise().seeds.figures
    phases = [phase for one in series for phase in judged(one, _named(one.times), series, seed)]
    random = np.random.default_rng(seed)
    hits = n = 0
    for one in series:
        if len(one.times) < 2 * ROOM:
            continue
        at = int(random.integers(ROOM // 2, len(one.times) - ROOM))
        slowed = np.where(np.arange(len(one.times)) >= at, INJECTED, 1.0) * one.times
        found = settled(judge(enumerate(1e6 * slowed)))
        hits += any(abs(v.since_iteration - at) <= 20 and v.at_iteration >= at for v in found)
        n += 1
    real, false = ([str(one) for one in phases if bool(one.why) is wrong] for wrong in (False, True))
    even = [str(one) for one in phases if not one.slow]
    return [
        figure(names[0], len(real), "", better="higher", note="; ".join([f"{len(series)} series", *real])),
        figure(names[1], len(false), "", bar=FALSE_BEFORE, better="lower", note="; ".join(false)),
        figure(names[2], len(even), "", better="lower", note="; ".join(even)),
        figure(names[3], 100 * hits / n, "%", bar=95, better="higher", note=f"{hits} of {n} series of {2 * ROOM} and more"),
    ]


def _named(times: Floats) -> list[tuple[int, int]]:
    found = settled(judge(enumerate(1e6 * times)))
    return [(one.since_iteration, one.until_iteration or len(times)) for one in found]


def workers() -> list[Figure]:
    """Alibaba's mini-batch times of ten workers that share GPUs, against its labels."""
    path, labels = (
        datasets.find("alibaba-minibatch", "minibatch-jobs-1-3.parquet"),
        datasets.find("alibaba-minibatch", "labels.csv"),
    )
    names = ("Alibaba job 1: others than worker 6 named", "Alibaba job 3: precision", "Alibaba job 3: recall")
    if path is None or labels is None:
        note = "data set alibaba-minibatch is absent: set UNSKEW_DATASETS"
        bars = ((0, "lower"), (None, "higher"), (None, "higher"))
        return [figure(n, None, "", bar=b, better=better, note=note) for n, (b, better) in zip(names, bars, strict=True)]  # type: ignore[arg-type]
    truth = {int(job): set(rows["worker"].to_list()) for (job,), rows in pl.read_csv(labels).group_by(["job"])}
    named = {job: _workers_named(path, job) for job in truth}
    note = "by the noise of the series: each worker has a quarter of a GPU"
    right = len(named[3] & truth[3])
    first = len(named[1] - {6}) if 6 in named[1] else None
    return [
        figure(names[0], first, "workers", bar=0, better="lower", note=f"named: {sorted(named[1])}; {note}"),
        figure(names[1], 100 * right / max(len(named[3]), 1), "%", better="higher", note=f"named: {sorted(named[3])}"),
        figure(names[2], 100 * right / len(truth[3]), "%", better="higher", note=f"labelled: {sorted(truth[3])}"),
    ]


def _workers_named(path: Path, job: int) -> set[int]:
    table = pl.read_parquet(path).filter(pl.col("job") == job).sort("time", "worker")
    wide = table.pivot(on="worker", index="time", values="batch_time_norm").sort("time")
    columns = sorted((name for name in wide.columns if name != "time"), key=int)
    us = wide.select(columns).to_numpy().astype(np.float64)[None]
    times = RankTimes(("step",), tuple(wide["time"].to_list()), dict.fromkeys(map(int, columns), 0), us)
    found = judge_workers(times, DetectorOptions(), equal_work=False)
    return {party.rank or 0 for verdict in found.verdicts for party in verdict.culprits}


def cost_of_judging() -> list[Figure]:
    """Milliseconds of one iteration of 256 devices, and whether memory stays flat."""
    noise, lengths = load_noise(), load_lengths("code")
    job = synthetic_job(LARGE, noise.seeds.figures, noise, lengths, None)
    detector, cost, spent = Detector(), cost_of(LARGE), []
    for iteration in range(job.iterations):
        committed = job.committed(iteration)
        began = time.process_time()
        detector.observe(committed, job.plan, cost)
        spent.append(time.process_time() - began)
    note = f"CPU time, one thread; median of {len(spent)}, at most {1e3 * max(spent):.1f}; {len(committed.chunks)} chunks each"
    name = "Detector: one iteration of 256 devices"
    found = [figure(name, 1e3 * float(np.median(spent)), "ms", bar=5, better="lower", note=note)]
    job = synthetic_job(LONG, noise.seeds.figures, noise, lengths, 1.3)
    detector, held = Detector(), {}
    for iteration in range(job.iterations):
        detector.observe(job.committed(iteration), job.plan, cost)
        if iteration in {LONG.iterations // 2, LONG.iterations - 1}:
            held[iteration] = held_bytes(detector.state)
    early, late = held.values()
    note = f"all that its state holds: {early / 1e3:.1f} kB after {LONG.iterations // 2} iterations, then {late / 1e3:.1f} kB"
    name = "Detector: memory grown over 200 iterations"
    return [*found, figure(name, (late - early) / 1e3, "kB", bar=0.5, better="lower", note=note)]
