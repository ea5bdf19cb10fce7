"""The whole job, whatever its devices show: where every rank is slower alike, none differs from the others.

Judged are the iterations in which nobody is named: where lengths are logged by what they took over what healthy devices take
for them, else by their times. Three questions:

1. did the job become slower and stay so for a while (analytics/detector/job_wide.py);
2. did it creep: do the iterations of the last third take longer than those of the first;
3. how much of the time do iterations take beyond the usual one, that take longer than noise explains. That has no cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, log, sqrt
from typing import Any

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Findings, UnexplainedTime
from unskew.analytics.detector import job_wide
from unskew.analytics.detector.job_wide import JobWideOptions
from unskew.analytics.detector.series_noise import BOUND, noise_of
from unskew.analytics.detector.verdicts import MEDIAN_ERROR, confidence_of
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.replay import makespan_us
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Verdict

OF_SOMEBODY = ("slow_device", "slow_link", "dead", "hung", "unknown")
NEXT_STEP = "nobody stands out: look at what all ranks share (power, cooling, network, storage, other jobs)"
DRIFT_SIGMAS = 3.0
Times = list[tuple[int, float]]


def times_of(run: RunLog, sections: Sequence[TraceSection], verdicts: Sequence[Verdict]) -> Times:
    """(iteration, its time in us) where nobody is named; over the predicted one, in millions, where lengths are logged: their
    iterations are no longer or shorter for their data."""
    if sections and all(section.lengths_logged for section in sections):
        over = [(one.recording, one.recording.iteration_us / _expected_us(one)) for one in sections]
        times = sorted((i, 1e6 * float(ratio)) for of, found in over for i, ratio in zip(of.iterations, found, strict=True))
    else:
        times = [(int(iteration), float(us)) for iteration, us in run.iterations.drop_nulls().iter_rows()]
    spans = [(one.since_iteration, one.until_iteration) for one in verdicts if one.cause in OF_SOMEBODY]
    return [(i, us) for i, us in times if not any(since <= i and (until is None or i < until) for since, until in spans)]


def judge_job(times: Times, number: int, *, alone: bool) -> tuple[Findings, UnexplainedTime]:
    """What the whole job shows, its verdicts numbered from `number` on, and the time that long iterations took. `alone`: the
    log has nothing else to judge anybody by."""
    options = JobWideOptions()
    state, changes = job_wide.follow(times, options)
    verdicts = settled(changes) or _crept(times, options)
    if not alone:
        verdicts = tuple(msgspec.structs.replace(one, evidence=_among_others(one.evidence)) for one in verdicts)
    numbered = tuple(msgspec.structs.replace(one, verdict=number + i) for i, one in enumerate(verdicts))
    return Findings(verdicts=numbered, sight=job_wide.sight_of(state, options)), _long_ones(times, options)


def _expected_us(section: TraceSection) -> Array:
    """[iteration]: chunks take what their lengths let expect, all else its median."""
    usual = np.median(section.parts.work_us, axis=1, keepdims=True)
    return makespan_us(section.recording.graph, np.where(np.isnan(section.expected_us), usual, section.expected_us))


def _among_others(evidence: dict[str, Any]) -> dict[str, Any]:
    """Evidence where everybody's times were recorded: it is not for want of them that nobody is named."""
    return {"next_step": NEXT_STEP, **{name: value for name, value in evidence.items() if name != "missing"}}


def _crept(times: Times, options: JobWideOptions) -> tuple[Verdict, ...]:
    """A verdict where the last third is slower than the first by more than `least_slowdown` and the errors of both medians."""
    known = [(iteration, log(us)) for iteration, us in times[options.least_known :] if us > 0]
    n = len(known) // 3
    if n < options.least_past:
        return ()
    first, last = (noise_of([x for _, x in third], options.sigma_floor) for third in (known[:n], known[-n:]))
    level, sigma = last.middle - first.middle, hypot(first.sigma, last.sigma)
    least = log(options.least_slowdown)
    if level - DRIFT_SIGMAS * MEDIAN_ERROR * sigma / sqrt(n) < least:
        return ()
    verdict = Verdict(
        verdict=1,
        cause="unknown",
        culprits=(),
        since_iteration=known[n][0],
        at_iteration=known[-1][0],
        confidence=round(confidence_of(level - least, sigma, n), 3),
        sentence=f"the whole job became slower bit by bit: its last third takes {exp(level):.2f} times as long as its first",
        evidence={
            "scope": "job",
            "time_ratio": round(exp(level), 4),
            "sigma": round(sigma, 4),
            "n": n,
            "missing": ["chunk times", "collective times"],
        },
    )
    return (verdict,)


def _long_ones(times: Times, options: JobWideOptions) -> UnexplainedTime:
    """What iterations that take longer than noise explains took beyond the usual one; those that paid for start-up are left
    out."""
    us = np.array([us for _, us in times[options.least_known :] if us > 0])
    if us.size < options.least_past:
        return UnexplainedTime()
    noise = noise_of(np.log(us).tolist(), options.sigma_floor)
    usual = exp(noise.middle)
    long = us > usual * max(exp(BOUND * noise.sigma), options.least_slowdown)
    share = float((us[long] - usual).sum() / us.sum())
    where = f"; {int(long.sum())} of {us.size} iterations take longer than noise explains"
    return UnexplainedTime(of_lost=float(share > 0), of_measured=share, where=where)
