"""The whole job of a log whose devices nobody judged live, by the rule that is live (analytics/detector/job_wide.py).

Judged are the times of the iterations in which nobody is named. A job that is faster all at once was slow until then, or had
more to do: that rule goes by the new pace, so what the first iterations took beyond it is time without a cause. So is what
single ones among the first took: the rule learns its pace from them.

Where ranks wait for each other an iteration takes as long as its longest rank. Where they are seen to wait for nobody, one that
takes longer holds up nobody else, so the job's pace is what most of them show (`common_pace`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, log

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.core.outcome import Findings, UnexplainedTime, times_as_long
from unskew.analytics.detector import job_wide
from unskew.analytics.detector.job_wide import NEXT_STEP, JobWideOptions
from unskew.analytics.detector.series.noise import BOUND, noise_of
from unskew.analytics.detector.series.stretches import StretchTest, steady_sigma, stretches_of
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.collector.events import Verdict

OF_SOMEBODY = ("slow_device", "slow_link", "dead", "hung", "unknown")
FIRST_WINDOWS = 2
"""As many times `least_past` iterations are the first: from then on most of the pace is learned from later ones."""
Times = list[tuple[int, float]]


def times_of(run: RunLog, verdicts: Sequence[Verdict], *, independent: bool) -> Times:
    """(iteration, its time in us) where nobody is named; of ranks that are seen to wait for nobody their common pace."""
    if independent:
        return common_pace(run.steps, verdicts)
    spans = [(one.since_iteration, one.until_iteration) for one in verdicts if one.cause in OF_SOMEBODY]
    return [
        (int(iteration), float(us))
        for iteration, us in run.iterations.drop_nulls().iter_rows()
        if not any(since <= iteration and (until is None or iteration < until) for since, until in spans)
    ]


def common_pace(steps: pl.DataFrame, verdicts: Sequence[Verdict]) -> Times:
    """(iteration, us) of ranks that wait for nobody, from their `steps` (iteration, rank, wall_us): the median, over the ranks
    that nobody is named for then, of what the step took over the rank's usual one. Iterations in which those are half of the
    ranks or less are left out.

    Three ranks whose steps take 10, 12 and 20 ms take 10, 12 and 60 in one: it is an iteration of the usual length.
    """
    named = pl.lit(value=False)
    for one in verdicts:
        until = pl.lit(value=True) if one.until_iteration is None else pl.col("iteration") < one.until_iteration
        ranks = [party.rank for party in one.culprits if party.rank is not None]
        named |= pl.col("rank").is_in(ranks) & (pl.col("iteration") >= one.since_iteration) & until
    own = steps.filter(~named & (pl.col("wall_us") > 0)).with_columns(usual_us=pl.col("wall_us").median().over("rank"))
    over = (pl.col("wall_us") / pl.col("usual_us")).median() * own["usual_us"].median()
    paces = own.group_by("iteration").agg(us=over, n=pl.len()).filter(2 * pl.col("n") > steps["rank"].n_unique())
    return [(int(iteration), float(us)) for iteration, us in paces.sort("iteration").select("iteration", "us").iter_rows()]


def judge_job(times: Times, number: int, *, alone: bool, options: JobWideOptions | None = None) -> Findings:
    """What the whole job shows, its verdicts numbered from `number` on. `alone`: the log has nothing else to judge anybody
    by."""
    options = options or JobWideOptions()
    state, changes = job_wide.follow(times, options)
    more = {"missing": ["chunk times", "collective times"]} if alone else {"next_step": NEXT_STEP}
    verdicts = (msgspec.structs.replace(one, evidence={**one.evidence, **more}) for one in settled(changes))
    numbered = tuple(msgspec.structs.replace(one, verdict=number + i) for i, one in enumerate(verdicts))
    sight = job_wide.sight_of(state, options)
    named = {iteration for one in numbered for iteration, _ in times if _speaks_of(one, iteration)}
    all_known = (job_wide.long_ones(state, options), _began_slower(times, options), _long_at_first(times, named, options))
    long_ones = max(all_known, key=lambda one: one.of_measured)
    return Findings(verdicts=numbered, sight=sight, of_job=sight, long_ones=long_ones)


def _speaks_of(verdict: Verdict, iteration: int) -> bool:
    until = verdict.until_iteration
    return verdict.since_iteration <= iteration and (until is None or iteration < until)


def _long_at_first(times: Times, named: Collection[int], options: JobWideOptions) -> UnexplainedTime:
    """What iterations among the first, beside those `named`, took beyond the usual one, where noise does not explain it. Those
    that the job begins with pay for its start."""
    known = [(iteration, us) for iteration, us in times if us > 0]
    if len(known) < options.least_past:
        return UnexplainedTime()
    logs = np.log([us for _, us in known])
    noise = noise_of(logs[: options.window].tolist(), options.sigma_floor)
    over, n = logs - noise.middle, FIRST_WINDOWS * options.least_past
    long = over[:n] > max(BOUND * noise.sigma, log(options.least_slowdown))
    long[: int(np.argmin([*long, False]))] = False
    long &= [iteration not in named for iteration, _ in known[:n]]
    if not long.any():
        return UnexplainedTime()
    beyond = float((np.exp(over[:n][long]) - 1).sum()) / float(np.exp(over).sum())
    where = f"; {int(long.sum())} of the first {len(long)} iterations take longer than noise explains"
    return UnexplainedTime(of_measured=beyond, where=where)


def _began_slower(times: Times, options: JobWideOptions) -> UnexplainedTime:
    """What the first iterations took beyond the pace at which the job went on after a step."""
    known, n = [(iteration, us) for iteration, us in times if us > 0], options.least_past
    if len(known) < 2 * n:
        return UnexplainedTime()
    logs = np.log([us for _, us in known])
    test = StretchTest.of(len(logs), 1, least=n, against_rest=True)
    sigma = max(steady_sigma(logs), options.sigma_floor)
    found = stretches_of(logs[None], np.array([sigma]), test).found
    if not found or found[0].begin > options.least_known or found[0].end > len(logs) - n:
        return UnexplainedTime()
    end = found[0].end
    pace = float(np.median(logs[end : end + options.window]))
    more = float(np.median(logs[:end])) - pace
    step = float(np.median(logs[end - n : end])) - float(np.median(logs[end : end + n]))
    if step < max(log(options.least_slowdown), more / 2):
        return UnexplainedTime()
    beyond = float(np.maximum(np.exp(logs[:end] - pace) - 1, 0.0).sum())
    where = f"; until iteration {known[end][0]} they take {times_as_long(exp(more))} as from then on"
    return UnexplainedTime(of_measured=beyond / float(np.exp(logs - pace).sum()), where=where)
