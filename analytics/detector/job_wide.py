"""Only iteration times: a slowdown of the whole job, and nobody to name for it (docs/reference/verdicts/job_wide.md).

Per iteration, on x = log(time):

1. reference = median of the last `window` values outside of suspicions and episodes; noise = their robust spread, wider where
   neighbours are alike (series_noise.py);
2. a sequential test, a CUSUM (cusum.py), on x - reference - level: of a slowdown, and within an episode of its end too; its
   threshold is higher where the job's own past has excesses that come near to it;
3. where it fires, the median since the onset decides: a verdict of cause "unknown" without culprits, its revision, its end.
   Each episode has a number of its own; a suspicion that comes to nothing is noise, and is learned as such.

`step` is pure, as everything that decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Sight
from unskew.analytics.detector.cusum import CusumLimits, CusumSums, raised, threshold
from unskew.analytics.detector.series_noise import SeriesNoise, noise_of
from unskew.analytics.detector.verdicts import MEDIAN_ERROR, confidence_of
from unskew.collector.events import Verdict, VerdictClosed

Verdicts = tuple[Verdict | VerdictClosed, ...]
Sample = tuple[int, float]  # iteration, log of its time


class JobWideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`least_slowdown` is forgiven in each iteration, or `slack_sigmas` of the noise where that is more; `least_loss`: what a
    slowdown has cost beyond that, in iterations (log), before it is named, however quiet the series. Counts are iterations:
    `window` for the reference, `least_past` before anything is reported, `least_known` before the test begins,
    `least_iterations` before it can fire."""

    least_slowdown: float = 1.05
    slack_sigmas: float = 1.0
    sigma_floor: float = 0.01
    least_loss: float = 0.2
    false_alarms_per_day: float = 1e-3
    iterations_per_day: int = 43_200
    least_iterations: int = 4
    least_known: int = 5
    least_past: int = 12
    window: int = 100


class JobWideState(msgspec.Struct, frozen=True, kw_only=True):
    """`past`: the last healthy samples, oldest first; `recent`: those of a suspicion, or within an episode of a change of it.
    `judged`: iterations that the test has seen outside of episodes; `level`: log of the slowdown now; `since`: onset of the
    open episode; `episodes`: how many there have been."""

    iteration: int = -1
    past: tuple[Sample, ...] = ()
    recent: tuple[Sample, ...] = ()
    sums: CusumSums = CusumSums.fresh((), -1)
    judged: int = 0
    level: float = 0.0
    since: int | None = None
    episodes: int = 0


def judge(times: Iterable[tuple[int, float]], options: JobWideOptions | None = None) -> list[Verdict | VerdictClosed]:
    """The verdicts on a whole series of (iteration, us), in order."""
    return follow(times, options)[1]


def follow(
    times: Iterable[tuple[int, float]], options: JobWideOptions | None = None
) -> tuple[JobWideState, list[Verdict | VerdictClosed]]:
    """The state after a whole series of (iteration, us), and the verdicts on the way."""
    options, state = options or JobWideOptions(), JobWideState()
    found: list[Verdict | VerdictClosed] = []
    for iteration, us in times:
        state, verdicts = step(state, iteration, us, options)
        found += verdicts
    return state, found


def sight_of(state: JobWideState, options: JobWideOptions) -> Sight:
    """What would have been named within as many iterations as were judged: what the test forgives, its threshold, and twice
    the errors of the mean of so many and of the reference."""
    n, known = min(state.judged, options.window), len(state.past)
    if n < options.least_iterations or known < options.least_past:
        why = f"{known} iterations without a slowdown, at least {options.least_past} are needed to judge the whole job"
        return Sight(scope="job", smallest_slowdown=None, why=why)
    noise = _noise(state, options)
    limits = limits_of(state.past, noise, options)
    error = 2 * noise.sigma * sqrt(1 / n + MEDIAN_ERROR**2 / known)
    return Sight(scope="job", smallest_slowdown=round(exp(float(limits.slack + limits.threshold / n) + error), 3))


def step(state: JobWideState, iteration: int, measured_us: float, options: JobWideOptions) -> tuple[JobWideState, Verdicts]:
    """One iteration further. Raises `ValueError` when it is not later than the last."""
    if iteration <= state.iteration:
        raise ValueError(f"iteration {iteration} after iteration {state.iteration}: iterations are judged once, in order")
    state = msgspec.structs.replace(state, iteration=iteration)
    if measured_us <= 0:
        return state, ()
    sample, slow = (iteration, log(measured_us)), state.since is not None
    if not slow and len(state.past) < options.least_known:
        return _learned(state, (sample,), options), ()
    noise = _noise(state, options)
    limits = limits_of(state.past, noise, options, state.level)
    over = np.asarray(sample[1] - noise.middle - state.level)
    sums = state.sums.advance(iteration, over, over, limits)
    side = sums.down if slow and sums.down.total > sums.up.total else sums.up
    recent = (*state.recent, sample)[-options.window :]
    state = msgspec.structs.replace(state, sums=sums, recent=recent, judged=state.judged + (not slow))
    if side.total <= 0:
        return (msgspec.structs.replace(state, recent=()) if slow else _learned(state, recent, options)), ()
    rows = tuple(seen for seen in recent if seen[0] > side.zero_at)
    if side.total <= limits.threshold or (not slow and len(state.past) + len(rows) < options.least_past):
        return state, ()
    return _changed(state, rows, noise, options)


def limits_of(past: Sequence[Sample], noise: SeriesNoise, options: JobWideOptions, level: float = 0.0) -> CusumLimits:
    """The test's constants at this noise and past; within an episode of `level`, what is nearer to a healthy job than to it
    ends it."""
    slack = max(log(options.least_slowdown), options.slack_sigmas * noise.sigma)
    slack = min(slack, level / 2) if level else slack
    iterations = options.iterations_per_day / options.false_alarms_per_day
    least = max(threshold(noise.sigma, slack, iterations), options.least_loss)
    limits = CusumLimits(np.asarray(slack), np.asarray(least), options.least_iterations)
    if level:
        return limits
    over = np.asarray([x for _, x in past]) - noise.middle - slack
    return msgspec.structs.replace(limits, threshold=np.asarray(raised(least, over, float(limits.cap), iterations)))


def _noise(state: JobWideState, options: JobWideOptions) -> SeriesNoise:
    return noise_of([x for _, x in state.past], options.sigma_floor)


def _learned(state: JobWideState, healthy: tuple[Sample, ...], options: JobWideOptions) -> JobWideState:
    """These are the job as it is without an episode, a suspicion that came to nothing too; the test begins anew."""
    past = (*state.past, *healthy)[-options.window :]
    sums = CusumSums.fresh((), state.iteration)
    return msgspec.structs.replace(state, past=past, recent=(), sums=sums, level=0.0, since=None)


def _changed(
    state: JobWideState, rows: tuple[Sample, ...], noise: SeriesNoise, options: JobWideOptions
) -> tuple[JobWideState, Verdicts]:
    """The test has fired: an episode begins, changes or ends, or all was noise."""
    level = float(np.median([x for _, x in rows])) - noise.middle
    limits = limits_of(state.past, noise, options)
    if level < limits.slack:
        closed = () if state.since is None else (_closed(state, rows[0][0]),)
        return _learned(state, rows, options), closed
    past, since, episodes = state.past, state.since, state.episodes
    if since is None:
        past, since = _onset(past, rows[0][0], noise.middle + level / 2, options)
        episodes += 1
    sums = CusumSums.fresh((), state.iteration)
    state = msgspec.structs.replace(state, past=past, recent=(), sums=sums, level=level, since=since, episodes=episodes)
    return state, (_verdict(state, since, len(rows), noise, limits),)


def _onset(past: tuple[Sample, ...], began: int, line: float, options: JobWideOptions) -> tuple[tuple[Sample, ...], int]:
    """The healthy past and the onset: of a past too short to be judged, what already was over `line` belongs to the episode."""
    if len(past) < options.least_past:
        while past[-1][1] > line:
            began, past = past[-1][0], past[:-1]
    return past, began


def _verdict(state: JobWideState, since: int, n: int, noise: SeriesNoise, limits: CusumLimits) -> Verdict:
    """Confidence: that the level is more than the slack, and no more than the job's own past allows: of its stretches as long
    as this one, the share that was not slow (Laplace's rule of succession)."""
    often = state.episodes / (state.judged / n + 2)
    sure = min(confidence_of(state.level - float(limits.slack), noise.sigma, n), max(1 - often, 0.0))
    return Verdict(
        verdict=state.episodes,
        cause="unknown",
        culprits=(),
        since_iteration=since,
        at_iteration=state.iteration,
        confidence=round(sure, 3),
        sentence=f"the whole job takes {exp(state.level):.2f} times as long since iteration {since}",
        evidence={
            "scope": "job",
            "time_ratio": round(exp(state.level), 4),
            "sigma": round(noise.sigma, 4),
            "threshold": round(float(limits.threshold), 3),
            "n": n,
            "missing": ["chunk times", "collective times"],
        },
    )


def _closed(state: JobWideState, until: int) -> VerdictClosed:
    reason = f"iterations are as short as before since iteration {until}"
    return VerdictClosed(verdict=state.episodes, until_iteration=until, at_iteration=state.iteration, reason=reason)
