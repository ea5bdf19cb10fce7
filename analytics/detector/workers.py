"""Only what each rank took per iteration and kind of work: against the others of its role, and against its own past.

No lengths are known, so there is no prediction. Two readings:

1. the Detector (the one that chunks are judged by), for which a rank's healthy time is the median of its first iterations: it
   sees changes, and takes what a rank always showed for healthy;
2. where ranks of one role have equal work, what a rank takes over the median of the others in the same iteration, from the
   first on: a CUSUM on that, whose heaviest stretch of iterations is the episode. It sees who was slow all the time.

The noise is measured on the series itself, as both readings would otherwise take a restless machine for a slow one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import exp, sqrt

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Findings, Sight, percent
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.detector.detector import Detector, sight_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, company_of, equal_roles, median_of_others
from unskew.analytics.detector.residuals import Floats, UnitTimes
from unskew.analytics.detector.series_noise import noise_of
from unskew.analytics.detector.suspicion import Excess, SpeedChange
from unskew.analytics.detector.verdicts import slow_verdict
from unskew.collector.events import Party, Verdict

OR_ITS_DATA = "or its data is always heavier than the others', as no lengths are recorded"
LEAST_US = 1e-3


class RankTimes(msgspec.Struct, frozen=True, dict=True):
    """`us` [kind, iteration, rank], nan = not seen. The ranks are the keys of `role_of`; those of one role do the same work."""

    kinds: tuple[str, ...]
    iterations: tuple[int, ...]
    role_of: dict[int, int]
    us: Floats


def judge_workers(times: RankTimes, options: DetectorOptions, *, equal_work: bool, lengths_known: bool = False) -> Findings:
    """Who is slow, and how slow one would have to be to be named. `equal_work`: whether (2) may compare; `lengths_known`: times
    are over what the data lets expect, so a rank's data is no excuse."""
    ranks = tuple(times.role_of)
    company = company_of(equal_roles(times.role_of), ranks)
    over = _over_others(times, company)
    noise = _noise(times, over)
    if equal_work:
        sigma = float(noise.max())
    else:  # independent ranks drift by themselves
        sigma = float(np.median([noise_of(one[~np.isnan(one)].tolist(), 0.0).sigma for one in over[0].T]))
    detected, sight = _changes(times, msgspec.structs.replace(options, sigma_floor=max(options.sigma_floor, sigma)))
    if not equal_work:
        return Findings(verdicts=detected, sight=_of_own_past(times, sight, options))
    compared = [*_differences(times, over, noise, company, options, lengths_known=lengths_known)]
    first: dict[tuple[Party, ...], Verdict] = {}
    for verdict in sorted([*compared, *detected], key=lambda one: one.since_iteration):
        first.setdefault(verdict.culprits, verdict)
    verdicts = tuple(msgspec.structs.replace(one, verdict=number) for number, one in enumerate(first.values(), start=1))
    return Findings(verdicts=verdicts, sight=_sight(times, over, noise, sight, options))


def _over_others(times: RankTimes, company: PeerGroups) -> Floats:
    """[kind, iteration, rank]: log of the time over the median of the other ranks of the role; nan where there are none."""
    n_kinds, n_iterations, n_ranks = times.us.shape
    columns = _logs(times).transpose(2, 0, 1).reshape(n_ranks, -1)
    others, _ = median_of_others(columns, company.peer_groups)
    return (columns - others).reshape(n_ranks, n_kinds, n_iterations).transpose(1, 2, 0)


def _logs(times: RankTimes) -> Floats:
    return np.log(np.maximum(times.us, LEAST_US))


def _noise(times: RankTimes, over: Floats) -> Floats:
    """[kind]: by what neighbours in time differ, which no lasting change moves."""
    found = np.zeros(len(times.kinds))
    for kind, (own, beside) in enumerate(zip(_logs(times), over, strict=True)):
        steps = np.abs(np.diff(own if np.isnan(beside).all() else beside, axis=0))
        steps = steps[~np.isnan(steps)]
        found[kind] = 1.4826 * float(np.median(steps)) / sqrt(2) if steps.size else 0.0
    return found


def _changes(times: RankTimes, options: DetectorOptions) -> tuple[tuple[Verdict, ...], Sight]:
    """The Detector's verdicts, as they are at the end."""
    detector, roles = Detector(options), equal_roles(times.role_of)
    n_kinds, _, n_ranks = times.us.shape
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a rank may lack a kind of work all that time
        expected = np.nanmedian(times.us[:, : options.own_past], axis=1)
    rank, kind = np.tile(np.array(list(times.role_of)), n_kinds), np.repeat(np.arange(n_kinds), n_ranks)
    state = RunState()
    for row, iteration in enumerate(times.iterations):
        units = UnitTimes(times.kinds, rank, kind, times.us[:, row].ravel(), expected.ravel())
        for event in detector.observe_units(iteration, units, roles):
            state = fold(state, event)
    return tuple(one.verdict for one in state.verdicts.values()), sight_of(detector.state, detector.options)


def _differences(
    times: RankTimes,
    over: Floats,
    noise: Floats,
    company: PeerGroups,
    options: DetectorOptions,
    *,
    lengths_known: bool,
) -> Iterator[Verdict]:
    """A verdict on each rank that took longer than the others of its role."""
    least = options.least_level(young=len(times.iterations) < options.own_past)
    for column, rank in enumerate(times.role_of):
        if np.isnan(over[:, :, column]).all(axis=1).any():
            continue
        episodes = {kind: _heaviest(over[k, :, column], float(noise[k]), options) for k, kind in enumerate(times.kinds)}
        kind, (begin, end, total) = max(episodes.items(), key=lambda item: item[1][2])
        levels = {k: float(np.nanmedian(over[i, begin:end, column])) for i, k in enumerate(times.kinds)}
        if total <= 1 or levels[kind] < least:
            continue
        sigma, n = max(float(noise[times.kinds.index(kind)]), options.sigma_floor), end - begin
        slacks = (max(least / 2, options.slack_of(float(of_kind))) for of_kind in noise)
        felt = {k: levels[k] for k, slack in zip(times.kinds, slacks, strict=True) if levels[k] >= slack}
        change = SpeedChange(
            since=times.iterations[begin],
            iterations=n,
            test=kind,
            cusum=total,
            threshold=1.0,
            levels=felt,
            excess={k: Excess(level, level) for k, level in levels.items()},
        )
        verdict = slow_verdict(
            1, rank, change, kinds=len(times.kinds), victims=company.data_parallel_peers[rank], at=times.iterations[-1],
            sigma=sigma, episodes=1, options=options,
        )  # fmt: skip
        after = over[times.kinds.index(kind), end:, column]
        if len(after) >= options.least_iterations and np.nanmedian(after) < levels[kind] / 2:
            verdict = msgspec.structs.replace(verdict, until_iteration=times.iterations[end])
        alike = len(verdict.speed) == len(times.kinds) and min(levels.values()) >= max(levels.values()) / 2
        yield _or_its_data(verdict) if begin == 0 and alike and not lengths_known else verdict


def _heaviest(over: Floats, sigma: float, options: DetectorOptions) -> tuple[int, int, float]:
    """The stretch [begin, end) in which the excess beyond the slack sums up to most, and that as a part of the threshold."""
    slack, threshold, cap = _limits(sigma, len(over), options)
    total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(np.minimum(over - slack, cap)))])
    risen = total[1:] - np.minimum.accumulate(total)[:-1]
    end = int(np.argmax(risen)) + 1
    return int(np.argmin(total[:end])), end, float(risen[end - 1]) / threshold


def _limits(sigma: float, n: int, options: DetectorOptions) -> tuple[float, float, float]:
    """Slack, threshold and cap of the test over n iterations, logs of time."""
    sigma = max(sigma, options.sigma_floor)
    slack, threshold = options.slack_of(sigma, young=n < options.own_past), options.threshold_of(sigma, 1)
    return slack, threshold, threshold / (options.least_iterations - 0.5)


def _of_own_past(times: RankTimes, sight: Sight, options: DetectorOptions) -> Sight:
    """A rank that differs from its peers from the first iterations on may be slow or have more to do: then nobody is well."""
    if sight.smallest_slowdown is None:
        return sight
    own, role = np.nanmedian(times.us[0, : options.own_past], axis=0), np.array(list(times.role_of.values()))
    ratio = own / np.array([np.nanpercentile(own[role == one], 50, method="lower") for one in role])
    furthest = int(np.nanargmax(ratio))
    if ratio[furthest] < sight.smallest_slowdown:
        return sight
    why = (
        f"rank {list(times.role_of)[furthest]} takes {ratio[furthest]:.2f} times as long as its peers from the first "
        "iterations on: it is slow or has more to do, and the log does not show which"
    )
    return Sight(scope=sight.scope, smallest_slowdown=None, why=why)


def _or_its_data(verdict: Verdict) -> Verdict:
    """Slow in all its work alike and all the time: a device, or what it is given."""
    return msgspec.structs.replace(
        verdict, sentence=f"{verdict.sentence}, {OR_ITS_DATA}", confidence=min(verdict.confidence, 0.5)
    )


def _sight(times: RankTimes, over: Floats, noise: Floats, of_changes: Sight, options: DetectorOptions) -> Sight:
    """What (2) would have seen; of a rank that has nobody to be compared with only changes are."""
    n = len(times.iterations)
    alone = np.isnan(over).all(axis=1).any(axis=0)
    number = list(times.role_of)[int(np.argmax(alone))]
    if alone.any() and of_changes.smallest_slowdown is not None:
        why = (
            f"rank {number} shares its work with no other, so slow from the first iterations on "
            "it looks like one that has more to do; one that turned slow later by "
            f"{percent(of_changes.smallest_slowdown)} or more would have been named"
        )
        return Sight(scope="device", smallest_slowdown=None, why=why)
    if alone.any():
        return of_changes
    if n < options.least_iterations:
        why = f"{n} iterations, at least {options.least_iterations} are needed"
        return Sight(scope="device", smallest_slowdown=None, why=why)
    least = options.least_level(young=n < options.own_past)
    levels = [least]
    for sigma in noise:
        slack, threshold, _ = _limits(float(sigma), n, options)
        levels.append(slack + threshold / n)
    return Sight(scope="device", smallest_slowdown=round(exp(max(levels)), 3))
