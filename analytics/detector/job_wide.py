"""Only iteration times: a slowdown of the whole job, and nobody to name for it (docs/reference/verdicts/job_wide.md).

Per iteration, on x = log(time):

1. reference = median of the last `window` quiet values, noise = 1.4826 x their median distance from it;
2. a two-sided CUSUM on x - reference - level (cusum.py), its threshold from the same budget of false alarms;
3. where it fires, the median since the onset decides: a verdict of cause "unknown" without culprits, its revision, its end.

`step` is pure, as everything that decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import msgspec
import numpy as np

from unskew.analytics.detector.cusum import CusumLimits, CusumSums, threshold
from unskew.analytics.detector.verdicts import confidence_of
from unskew.collector.events import Verdict, VerdictClosed

Verdicts = tuple[Verdict | VerdictClosed, ...]


class JobWideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`least_slowdown`: the smallest that is named; `slack`: the part of it forgiven in each iteration, at least `slack_sigmas`
    of the noise. Counts are iterations: `window` for the reference, `least_past` before anything is reported,
    `least_iterations` before a test can fire, `persistence` before a verdict (EROICA's window): a job as a whole often is
    slow for less, and nobody could be named for it."""

    least_slowdown: float = 1.09
    slack: float = 0.6
    slack_sigmas: float = 1.0
    sigma_floor: float = 0.01
    false_alarms_per_day: float = 1e-3
    iterations_per_day: int = 43_200
    least_iterations: int = 6
    persistence: int = 50
    least_past: int = 20
    window: int = 100


class JobWideState(msgspec.Struct, frozen=True, kw_only=True):
    """`past`: the last quiet values of x, less what was estimated, oldest first; `recent`: (iteration, x) since then."""

    iteration: int = -1
    past: tuple[float, ...] = ()
    recent: tuple[tuple[int, float], ...] = ()
    sums: CusumSums = CusumSums.fresh((), -1)
    level: float = 0.0
    open: int | None = None
    next_verdict: int = 1


def judge(times: Iterable[tuple[int, float]], options: JobWideOptions | None = None) -> list[Verdict | VerdictClosed]:
    """The verdicts on a whole series of (iteration, us), in order."""
    options, state = options or JobWideOptions(), JobWideState()
    found: list[Verdict | VerdictClosed] = []
    for iteration, us in times:
        state, verdicts = step(state, iteration, us, options)
        found += verdicts
    return found


def step(state: JobWideState, iteration: int, measured_us: float, options: JobWideOptions) -> tuple[JobWideState, Verdicts]:
    """One iteration further. Raises `ValueError` when it is not later than the last."""
    if iteration <= state.iteration:
        raise ValueError(f"iteration {iteration} after iteration {state.iteration}: iterations are judged once, in order")
    if measured_us <= 0:
        return msgspec.structs.replace(state, iteration=iteration), ()
    x = log(measured_us)
    if len(state.past) < options.least_past:
        sums = CusumSums.fresh((), iteration)
        return msgspec.structs.replace(state, iteration=iteration, past=(*state.past, x), sums=sums), ()
    past = np.array(state.past)
    reference = float(np.median(past))
    sigma = max(1.4826 * float(np.median(np.abs(past - reference))), options.sigma_floor)
    limits = limits_of(sigma, options)
    over = np.asarray(x - reference - state.level)
    sums = state.sums.advance(iteration, over, over, limits)
    side = sums.up if sums.up.total >= sums.down.total else sums.down
    quiet = side.total <= 0
    state = msgspec.structs.replace(
        state,
        iteration=iteration,
        sums=sums,
        past=(*past, x - state.level)[-options.window :] if quiet else state.past,
        recent=() if quiet else (*state.recent, (iteration, x))[-options.window :],
    )
    rows = [(at, seen) for at, seen in state.recent if at > side.zero_at]
    if side.total <= limits.threshold or len(rows) < options.persistence:
        return state, ()
    return _changed(state, rows, sigma, limits, options)


def limits_of(sigma: float, options: JobWideOptions) -> CusumLimits:
    """The test's constants at this noise."""
    slack = max(options.slack * log(options.least_slowdown), options.slack_sigmas * sigma)
    limit = threshold(sigma, slack, options.iterations_per_day / options.false_alarms_per_day)
    return CusumLimits(np.asarray(slack), np.asarray(limit), options.least_iterations)


def _changed(
    state: JobWideState, rows: list[tuple[int, float]], sigma: float, limits: CusumLimits, options: JobWideOptions
) -> tuple[JobWideState, Verdicts]:
    """The test has fired: what is estimated now. A faster job than ever, or a change too small to name, is the new bias."""
    level = float(np.median([x for _, x in rows]) - np.median(state.past))
    slow = level >= log(options.least_slowdown)
    past = state.past if slow or state.open is not None else tuple(x for _, x in rows)
    after = msgspec.structs.replace(
        state, sums=CusumSums.fresh((), state.iteration), recent=(), level=level if slow else 0.0, past=past
    )
    since = rows[0][0]
    if slow:
        number = state.next_verdict if state.open is None else state.open
        sure = confidence_of(level - float(limits.slack), sigma, len(rows))
        verdict = Verdict(
            verdict=number,
            cause="unknown",
            culprits=(),
            since_iteration=since,
            at_iteration=state.iteration,
            confidence=sure,
            sentence=(
                f"the whole job takes {exp(level):.2f} times as long since iteration {since}; iteration times alone do not "
                "tell who is slow: record chunks, or probe the devices"
            ),
            evidence={
                "scope": "job",
                "time_ratio": round(exp(level), 4),
                "sigma": round(sigma, 4),
                "threshold": round(float(limits.threshold), 3),
                "n": len(rows),
                "missing": ["chunk times", "collective times"],
            },
        )
        return msgspec.structs.replace(after, open=number, next_verdict=max(state.next_verdict, number + 1)), (verdict,)
    if state.open is None:
        return after, ()
    reason = f"iterations are as short as before since iteration {since}"
    closed = VerdictClosed(verdict=state.open, until_iteration=since, at_iteration=state.iteration, reason=reason)
    return msgspec.structs.replace(after, open=None), (closed,)
