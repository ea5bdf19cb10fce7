"""Our Detector and the published ones on ResiHP's protocol: recall, delay, onset, false alarms; and on iteration times alone.

The jobs are those of lab/studies/detection.py: seeds of the figures, not of the tuning. Half of them have no fault; the
other half share out the slowdowns. A slowdown of 4 is there because ResiHP's own experiments are that severe (jobs that lose
35 to 70 % of their throughput).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from joblib import Parallel, delayed

from unskew.analytics.lab.baselines.registry import METHODS
from unskew.analytics.lab.studies.detection import SETTINGS, DetectionOutcome, JobSetting, run, synthetic_job, wilson
from unskew.analytics.lab.studies.noise import load_lengths, load_noise
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

JOBS = 1_000
BLOCK = 20
FACTORS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)
CORPUS = "code"
PUBLISHED = {"resihp": "published: 0 to 0.3 a job", "greyhound": "published: 3.7 to 8.7 a job"}


def figures(bench: Bench, jobs: int = JOBS, settings: Sequence[JobSetting] = SETTINGS) -> list[Figure]:
    """All methods, setting by setting."""
    found: list[Figure] = []
    for number, setting in enumerate(settings):
        first = load_noise().seeds.figures + number * JOBS
        outings: list[DetectionOutcome] = []
        with Parallel(n_jobs=-1) as pool:
            for block in bench.steps(setting.name, range(0, jobs, BLOCK)):
                numbers = range(block, min(block + BLOCK, jobs))
                outings += chain(*pool(delayed(_outings)(setting, first + i, _factor(i)) for i in numbers))
        found += ours(setting, [outing for outing in outings if outing.method == "unskew"])
        for method in METHODS:
            found += in_the_table(setting, method, [outing for outing in outings if outing.method == method])
    return found


def _factor(job: int) -> float | None:
    return None if job % 2 == 0 else FACTORS[job // 2 % len(FACTORS)]


def _outings(setting: JobSetting, seed: int, factor: float | None) -> list[DetectionOutcome]:
    return run(synthetic_job(setting, seed, load_noise(), load_lengths(CORPUS), factor), list(METHODS.values()))


def ours(setting: JobSetting, outings: Sequence[DetectionOutcome]) -> list[Figure]:
    """What is asked of our Detector in one setting."""
    n = len(outings)
    found: list[Figure] = []
    slow = [outing for outing in outings if outing.factor is not None and outing.factor >= 1.15]
    hits = sum(outing.named for outing in slow)
    if slow:
        low, high = wilson(hits, len(slow))
        note = f"{hits} of {len(slow)}, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
        name = f"{setting.name}: slow devices named, slowdown 1.15 and more"
        found.append(figure(name, 100 * hits / len(slow), "%", bar=99.5, better="higher", note=note))
        errors = [abs(outing.onset_error) for outing in slow if outing.onset_error is not None]
        if errors:
            name = f"{setting.name}: onset error, 95th percentile"
            found.append(figure(name, float(np.quantile(errors, 0.95)), "iterations", bar=2, better="lower"))
    alarms = sum(outing.false_alarms for outing in outings)
    note = f"{alarms} in {n} jobs of {setting.iterations} iterations on {setting.pp * setting.dp} ranks"
    name = f"{setting.name}: false alarms"
    found.append(figure(name, alarms / n, "a job", bar=0.01, better="lower", note=note))
    for factor, bar in ((1.1, 10), (1.3, 3)):
        delays = [outing.delay for outing in outings if outing.factor == factor]
        if delays:
            median = float(np.median([np.inf if delay is None else delay for delay in delays]))
            name = f"{setting.name}: delay at {factor:g}, median"
            value = median if np.isfinite(median) else None
            found.append(figure(name, value, "iterations", bar=bar, better="lower", note=f"of {len(delays)} jobs"))
    return found


def in_the_table(setting: JobSetting, method: str, outings: Sequence[DetectionOutcome]) -> list[Figure]:
    """One row of the table of all methods: recall with its curve, alarms and verdicts of healthy ranks."""
    slow = [outing for outing in outings if outing.factor is not None and outing.factor >= 1.15]
    name = f"{setting.name}, {method}"
    recall = 100 * sum(outing.named for outing in slow) / len(slow) if slow else None
    alarms = sum(outing.false_alarms for outing in outings) / len(outings)
    flagged = sum(outing.flagged for outing in outings) / len(outings)
    return [
        figure(f"{name}: recall from 1.15 on", recall, "%", better="higher", note=curve(outings)),
        figure(f"{name}: false alarms", alarms, "a job", better="lower", note=PUBLISHED.get(method, "")),
        figure(f"{name}: healthy ranks accused", flagged, "a job", better="lower"),
    ]


def curve(outings: Sequence[DetectionOutcome]) -> str:
    """Recall with its interval, and median delay, against the slowdown."""
    points = []
    for factor in FACTORS:
        mine = [outing for outing in outings if outing.factor == factor]
        if not mine:
            continue
        hits = sum(outing.named for outing in mine)
        low, high = wilson(hits, len(mine))
        delays = [outing.delay for outing in mine if outing.delay is not None]
        delay = f", delay {np.median(delays):g}" if delays else ""
        points.append(f"{factor:g}: {100 * hits / len(mine):.0f} % [{100 * low:.0f}-{100 * high:.0f}]{delay}")
    return "; ".join(points)
