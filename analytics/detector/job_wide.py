"""A slowdown of the whole job, and nobody to name for it: live and of a finished log (docs/reference/verdicts/job_wide.md).

Per iteration, on x = log(time), or log(time over what it should take); of a range the nearest to what is expected (ranges.py):

1. reference = median of the last `window` values outside of suspicions and episodes; noise = their robust spread, wider where
   neighbours are alike (series/noise.py);
2. a sequential test, a CUSUM (cusum.py), on x - reference - level: of a slowdown, and within an episode of its end too; its
   threshold is higher where the job's own past has excesses that come near to it;
3. where it fires, the median since the onset decides: a verdict of cause "unknown" without culprits, its revision, its end.
   An episode begins when more of its iterations are slow than the job's own past has by chance, all of its long ones counted
   (series/bursts.py), and in a young job when it is a step. Each has a number of its own; a suspicion that comes to nothing is
   noise, and is learned as such;
4. the reference follows a job that becomes slower bit by bit, so now and then the last iterations are compared with the first
   (an episode too, whose reference is the first ones);
5. what iterations that take longer than noise explains took beyond the usual one is added up: time without a cause.

`step` is pure, as everything that decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, hypot, log, sqrt

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Sight, UnexplainedTime, times_as_long
from unskew.analytics.detector.cusum import CusumLimits, CusumSums, raised, rise, threshold
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.series.bursts import LongIterations
from unskew.analytics.detector.series.levels import fires_from, likeliest_onset
from unskew.analytics.detector.series.noise import BOUND, SeriesNoise, lone_spread, noise_of
from unskew.analytics.detector.series.ranges import Sample, Samples, agreed, within
from unskew.analytics.detector.series.wander import Paces
from unskew.analytics.detector.verdicts import MEDIAN_ERROR, confidence_of
from unskew.collector.events import Verdict, VerdictClosed

DRIFT_SIGMAS = 3.0
BY_CHANCE = 3e-4
"""What a past like the job's has so often by itself is its noise: every fourth iteration long, or six in a row now and then."""
STEADY_ERRORS, OVER_ERRORS = 3.0, 2.0
NEXT_STEP = "nobody stands out: look at what all ranks share (power, cooling, network, storage, other jobs)"
Verdicts = tuple[Verdict | VerdictClosed, ...]


class JobWideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`least_slowdown` is forgiven in each iteration, or `slack_sigmas` of the noise where that is more; `least_loss`: what a
    slowdown has cost beyond that, in iterations (log), before it is named, however quiet the series; of a job that is known for
    less than half of `window` a smaller one than `least_slowdown_young` has to be a step. Counts are iterations: `window` for
    the reference, `least_past` before anything is reported, `least_known` before the test begins, `least_iterations` before it
    can fire."""

    least_slowdown: float = 1.05
    least_slowdown_young: float = 1.15
    slack_sigmas: float = 1.0
    sigma_floor: float = 0.01
    least_loss: float = 0.2
    false_alarms_per_day: float = 1e-3
    iterations_per_day: int = 43_200
    least_iterations: int = 4
    least_known: int = 5
    least_past: int = 12
    window: int = 100

    @staticmethod
    def like(options: DetectorOptions) -> JobWideOptions:
        """For a job on devices of a class."""
        default = JobWideOptions()
        return JobWideOptions(
            least_slowdown=options.job_slowdown,
            sigma_floor=max(default.sigma_floor, options.sigma_floor),
            least_loss=default.least_loss * options.job_iterations / default.least_iterations,
            least_iterations=options.job_iterations,
        )


class JobWideState(msgspec.Struct, frozen=True, kw_only=True):
    """`past`: the last healthy samples, oldest first; `recent`: those of a suspicion, or within an episode of a change of it.
    `judged`: iterations that the test has seen outside of episodes; `level`: log of the slowdown now; `since`: onset of the
    open episode, `crept`: whether it came bit by bit, `shown`: its last revision, `slow`: its iterations, and their levels
    together; `episodes`: how many there have been. `start`: the first samples of all, `first`: the first healthy ones, of
    `healthy`, so many of which were `compared` with these. `spent`: what these took, and of it `beyond` by `long` of them
    beyond the usual iteration, in usual ones. `bursts`: the long ones from further back."""

    iteration: int = -1
    past: tuple[Sample, ...] = ()
    recent: tuple[Sample, ...] = ()
    sums: CusumSums = CusumSums.fresh((), -1)
    judged: int = 0
    level: float = 0.0
    since: int | None = None
    crept: bool = False
    shown: Verdict | None = None
    slow: tuple[int, float] = (0, 0.0)
    episodes: int = 0
    first: tuple[Sample, ...] = ()
    healthy: int = 0
    compared: int = 0
    spent: float = 0.0
    beyond: float = 0.0
    long: int = 0
    start: tuple[Sample, ...] = ()
    bursts: LongIterations = LongIterations()
    paces: Paces = Paces()


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
        if us > 0:
            state, verdicts = step(state, (iteration, log(us), log(us)), options)
            found += verdicts
    return state, found


def sight_of(state: JobWideState, options: JobWideOptions) -> Sight:
    """What would have been named within as many iterations as were judged: what the test forgives, what brings its sum over the
    threshold, and twice the errors of the mean of so many, of the reference, and of a pace that wanders; at least so much that
    where it fires the median of so few is over what is forgiven."""
    n, known = min(state.judged, options.window), len(state.past)
    if n < options.least_iterations or known < options.least_past:
        least = options.least_past if known < options.least_past else options.least_past + options.least_iterations
        why = f"{known} iteration{'s' * (known != 1)} without a slowdown, at least {least} are needed to judge the whole job"
        return Sight(scope="job", smallest_slowdown=None, why=why)
    noise = _noise(state.past, options)
    if (risen := _risen(state, options)) is not None:
        why = f"the last iterations take {times_as_long(exp(risen))} as the first ones, not for long enough yet to be named"
        return Sight(scope="job", smallest_slowdown=None, why=why)
    limits = limits_of(state.past, noise, options)
    error, of_median = 2 * noise.sigma * sqrt(1 / n + MEDIAN_ERROR**2 / known), 2 * MEDIAN_ERROR * noise.sigma
    decided = min(of_median**2 / float(limits.threshold), of_median / sqrt(options.least_iterations))
    wandered = state.paces.wandered(MEDIAN_ERROR * lone_spread(agreed(state.past)))
    level = float(limits.slack) + max(rise(noise.sigma, limits, n) + hypot(error, wandered), decided)
    if len(state.past) < options.window // 2 and n < options.least_past:
        level = max(level, log(options.least_slowdown_young))
    level += float(np.median(within(state.past, noise.middle) - [least for _, least, _ in state.past]))
    levels = (level, *state.bursts.lines(level))
    shown = next((one for one in levels if state.bursts.chance(n, n, one / 2) <= BY_CHANCE), None)
    if shown is None:
        why = f"the job is slow for as long as {n} iterations by itself now and then"
        return Sight(scope="job", smallest_slowdown=None, why=why)
    return Sight(scope="job", smallest_slowdown=round(exp(shown), 3))


def long_ones(state: JobWideState, options: JobWideOptions, held: Iterable[Sample] = ()) -> UnexplainedTime:
    """What iterations took that were long, and are no episode's. Those of a suspicion that is still open count, and those
    `held`, which nobody has judged yet: a job may end with them."""
    waiting = (*state.recent, *held)
    if state.since is None and waiting:
        state = _learned(state, waiting, _noise(state.past, options), options)
    where = f"; {state.long} of {state.healthy} iterations take longer than noise explains"
    beyond = state.beyond / state.spent if state.long else 0.0
    long = UnexplainedTime(of_measured=beyond, where=where if beyond else "")
    return max(long, _began_faster(state, options), key=lambda one: one.of_measured)


def _began_faster(state: JobWideState, options: JobWideOptions) -> UnexplainedTime:
    """What a job takes beyond its very first iterations, too few for its pace to be learned from, or not yet as long."""
    if len(state.start) < options.least_past or not state.past:
        return UnexplainedTime()
    pace, first, least = _noise(state.past, options).middle, _noise(state.start, options), log(options.least_slowdown)
    logs, found = within(state.start, pace), list[tuple[float, float, str]]()
    for n in range(1, options.least_known + 1):  # by lone values: how alike neighbours are says nothing of these
        faster, sure = pace - float(np.median(logs[:n])), BOUND * max(pace - min(logs[n:]), options.sigma_floor)
        found.append((faster, max(sure, 2 * least), f"until iteration {state.start[n - 1][0]}"))
    sure = DRIFT_SIGMAS * MEDIAN_ERROR * first.sigma / sqrt(len(logs))
    found.append((pace - first.middle, max(sure, 1.5 * least), f"the first {len(logs)}"))
    faster, since = next(((faster, since) for faster, sure, since in found if faster >= sure), (0.0, ""))
    where = f"; iterations take {times_as_long(exp(faster))} as {since}, too early to know" if since else ""
    return UnexplainedTime(of_measured=1 - exp(-faster), where=where)


def step(state: JobWideState, sample: Sample, options: JobWideOptions) -> tuple[JobWideState, Verdicts]:
    """One iteration further. Raises `ValueError` when it is not later than the last."""
    iteration, slow = sample[0], state.since is not None
    if iteration <= state.iteration:
        raise ValueError(f"iteration {iteration} after iteration {state.iteration}: iterations are judged once, in order")
    state = msgspec.structs.replace(state, iteration=iteration)
    if len(state.start) < options.least_past:
        state = msgspec.structs.replace(state, start=(*state.start, sample))
    if not slow and len(state.past) < options.least_known:
        past, sums = (*state.past, sample), CusumSums.fresh((), iteration)
        bursts = msgspec.structs.replace(state.bursts, known=state.bursts.known + 1)
        return msgspec.structs.replace(state, past=past, sums=sums, bursts=bursts), ()
    noise = _noise(known := np.array(state.past), options)
    limits = limits_of(known, noise, options, state.level)
    over = within([sample], noise.middle + state.level)[0] - (noise.middle + state.level)
    sums = state.sums.advance(iteration, over, over, limits)
    side = sums.down if slow and sums.down.total > sums.up.total else sums.up
    recent = (*state.recent, sample)[-options.window :]
    state = msgspec.structs.replace(state, sums=sums, recent=recent, judged=state.judged + (not slow))
    if side.total <= 0:
        return (_slow(state, len(recent)), ()) if slow else _crept(_learned(state, recent, noise, options), options)
    rows = tuple(seen for seen in recent if seen[0] > side.zero_at)
    if side.total <= limits.threshold or (not slow and len(state.past) + len(rows) < options.least_past):
        return state, ()
    return _changed(state, rows, noise, options)


def set_aside(state: JobWideState, since: int, why: str, options: JobWideOptions) -> tuple[JobWideState, Verdicts]:
    """Somebody is named for what is slow since iteration `since`: the suspicion of the job, and an episode that began with it,
    were his."""
    state = msgspec.structs.replace(state, recent=(), sums=CusumSums.fresh((), state.iteration))
    if state.since is None or state.since < since - options.least_iterations:
        return state, ()
    at = state.iteration
    closed = VerdictClosed(verdict=state.episodes, until_iteration=at, at_iteration=at, reason=why)
    return msgspec.structs.replace(state, since=None, level=0.0, crept=False), (closed,)


def limits_of(past: Samples, noise: SeriesNoise, options: JobWideOptions, level: float = 0.0) -> CusumLimits:
    """The test's constants at this noise and past; within an episode of `level`, what is nearer to a healthy job than to it
    ends it."""
    slack = max(log(options.least_slowdown), options.slack_sigmas * noise.sigma)
    slack = min(slack, level / 2) if level else slack
    iterations = options.iterations_per_day / options.false_alarms_per_day
    least = max(threshold(noise.sigma, slack, iterations), options.least_loss)
    limits = CusumLimits(np.asarray(slack), np.asarray(least), options.least_iterations)
    if level:
        return limits
    over = within(past, noise.middle) - noise.middle - slack
    return msgspec.structs.replace(limits, threshold=np.asarray(raised(least, over, float(limits.cap), iterations)))


def _noise(samples: Samples, options: JobWideOptions, near: float | None = None) -> SeriesNoise:
    return noise_of(agreed(samples, near), options.sigma_floor)


def _learned(state: JobWideState, healthy: tuple[Sample, ...], noise: SeriesNoise, options: JobWideOptions) -> JobWideState:
    """These are the job as it is without an episode, a suspicion that came to nothing too; the test begins anew."""
    over = (within(healthy, noise.middle) - noise.middle).tolist()
    long = [one for one in over if one > max(BOUND * noise.sigma, log(options.least_slowdown))]
    return msgspec.structs.replace(
        state,
        past=(*state.past, *healthy)[-options.window :],
        recent=(),
        sums=CusumSums.fresh((), state.iteration),
        level=0.0,
        since=None,
        crept=False,
        first=state.first if len(state.first) >= options.window else (*state.first, *healthy)[: options.window],
        healthy=state.healthy + len(healthy),
        spent=state.spent + sum(map(exp, over)),
        beyond=state.beyond + sum(exp(one) - 1 for one in long),
        long=state.long + len(long),
        bursts=state.bursts.learned(zip((one[0] for one in healthy), over, strict=True), log(options.least_slowdown)),
        paces=state.paces.learned([noise.middle + one for one in over]),
    )


def _crept(state: JobWideState, options: JobWideOptions) -> tuple[JobWideState, Verdicts]:
    """An episode where the last third of the healthy samples, `window` at most, is slower than the first by more than
    `least_slowdown` and the errors of both medians."""
    n = min(state.healthy // 3, options.window)
    if n < options.least_past or state.healthy < state.compared + options.least_past:
        return state, ()
    state = msgspec.structs.replace(state, compared=state.healthy)
    first = _noise(state.first[:n], options)
    last = _noise(state.past[-n:], options, first.middle)
    level, sigma = last.middle - first.middle, hypot(first.sigma, last.sigma)
    if level - DRIFT_SIGMAS * MEDIAN_ERROR * sigma / sqrt(n) < log(options.least_slowdown):
        return state, ()
    since, past = state.first[n - 1][0] + 1, state.first[:n]
    sums, episodes = CusumSums.fresh((), state.iteration), state.episodes + 1
    state = msgspec.structs.replace(
        state, past=past, sums=sums, level=level, since=since, crept=True, shown=None, episodes=episodes
    )
    noise = SeriesNoise(first.middle, sigma)
    return state, (_verdict(state, since, n, noise, limits_of(past, noise, options)),)


def _risen(state: JobWideState, options: JobWideOptions) -> float | None:
    """By how much the last `least_past` iterations are above the first third of the healthy ones (log), where that is as much
    as is named; else None. A ramp makes thirds look noisy, and the reference follows it: nothing may be named for long then."""
    n, last = min(state.healthy // 3, options.window), (*state.past, *state.recent)[-options.least_past :]
    if state.since is not None or n < options.least_past:
        return None
    after = agreed(last, float(np.median(before := agreed(state.first[:n]))))
    error = DRIFT_SIGMAS * MEDIAN_ERROR * hypot(lone_spread(before) / sqrt(n), lone_spread(after) / sqrt(len(after)))
    level = float(np.median(after) - np.median(before))
    return level if level - error >= log(options.least_slowdown) else None


def _changed(
    state: JobWideState, rows: tuple[Sample, ...], noise: SeriesNoise, options: JobWideOptions
) -> tuple[JobWideState, Verdicts]:
    """The test has fired: an episode begins, changes or ends, or all was noise."""
    limits, over = limits_of(state.past, noise, options), within(rows, noise.middle + state.level) - noise.middle
    at = 0 if state.since is not None else fires_from(over, limits)
    if at is None:
        return state, ()
    rows, level = rows[at:], float(np.median(over[at:]))
    unsure = 0.0 if state.since is None else OVER_ERRORS * MEDIAN_ERROR * noise.sigma / sqrt(len(rows))
    if level < limits.slack + unsure:
        closed = () if state.since is None else _closed(_slow(state, len(state.recent) - len(rows)), rows[0][0])
        return _learned(state, rows, noise, options), closed
    past, since, episodes = state.past, state.since, state.episodes
    if since is None and not _beyond_its_own(state, rows, noise, level, options):
        return state, ()
    n_slow = len(state.recent)
    if since is None:
        healthy = likeliest_onset(over[at:], level)
        past, rows = (*past, *rows[:healthy]), rows[healthy:]
        known = len(past)
        past, since = _onset(past, rows[0][0], noise.middle + level / 2, options)
        n_slow, state = known - len(past) + len(rows), msgspec.structs.replace(state, slow=(0, 0.0))
        episodes += 1
    sums, first = CusumSums.fresh((), state.iteration), tuple(one for one in state.first if one[0] < since)
    state = msgspec.structs.replace(state, past=past, sums=sums, level=level, since=since, episodes=episodes, first=first)
    shown = _verdict(state, since, len(rows), noise, limits)
    return msgspec.structs.replace(_slow(state, n_slow), shown=shown), (shown,)


def _slow(state: JobWideState, n: int) -> JobWideState:
    """So many more iterations are of the open episode, at its level: lone ones that are much longer do not make it larger."""
    return msgspec.structs.replace(state, recent=(), slow=(state.slow[0] + n, state.slow[1] + n * exp(state.level)))


def _beyond_its_own(
    state: JobWideState, rows: tuple[Sample, ...], noise: SeriesNoise, level: float, options: JobWideOptions
) -> bool:
    """Whether it is more than the job does by itself: more of its iterations are as long as half of the level than the past has
    by chance; and of a job that is young, whose way to settle nobody knows, it is large, or a step and no wandering."""
    logs = within(rows, noise.middle)
    slow = int(np.sum(logs > noise.middle + level / 2))
    if state.bursts.chance(len(rows), slow, level / 2) > BY_CHANCE:
        return False
    if level >= log(options.least_slowdown_young) or len(state.past) >= options.window // 2:
        return True
    if len(rows) < options.least_past:
        return False
    parts = np.array_split(logs, min(len(logs) // 4, 6))
    error = MEDIAN_ERROR * lone_spread(logs) * sqrt(2 / len(parts[-1]))
    return float(np.ptp([np.median(part) for part in parts])) < STEADY_ERRORS * error


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
    pace = times_as_long(exp(state.level))
    sentence = f"the whole job takes {pace} since iteration {since}"
    if state.crept:
        sentence = f"the whole job became slower bit by bit: it takes {pace} as in its first iterations"
    return Verdict(
        verdict=state.episodes,
        cause="unknown",
        culprits=(),
        since_iteration=since,
        at_iteration=state.iteration,
        confidence=round(sure, 3),
        sentence=sentence,
        evidence={
            "scope": "job",
            "time_ratio": round(exp(state.level), 4),
            "sigma": round(noise.sigma, 4),
            "threshold": round(float(limits.threshold), 3),
            "n": n,
            "pattern": "creep" if state.crept else "step",
        },
    )


def _closed(state: JobWideState, until: int) -> Verdicts:
    """An episode's end; before it, where it was revised, what all its iterations took: a revision is of the last ones. One that
    crept is stated as it began."""
    why, at = f"iterations are as short as before since iteration {until}", state.iteration
    closed, ratio = VerdictClosed(verdict=state.episodes, until_iteration=until, at_iteration=at, reason=why), _ratio(state)
    if state.shown is None or state.shown.evidence["time_ratio"] == ratio:
        return (closed,)
    sentence = f"the whole job takes {times_as_long(ratio)} since iteration {state.since}"
    evidence = {**state.shown.evidence, "time_ratio": ratio}
    return msgspec.structs.replace(state.shown, at_iteration=at, sentence=sentence, evidence=evidence), closed


def _ratio(state: JobWideState) -> float:
    """Of an episode: the mean of its levels."""
    n, together = state.slow
    return round(together / n, 4) if n else 1.0
