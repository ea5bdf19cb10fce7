"""Only what each rank took per iteration and kind of work: against the others of its role, and against its own past.

No lengths are known, so there is no prediction. Two readings:

1. the Detector (the one that chunks are judged by), for which a rank's healthy time is the median of its first iterations: it
   sees changes, and takes what a rank always showed for healthy;
2. the stretches of iterations in which a rank takes longer (series/stretches.py), an episode each: where ranks of one role have
   equal work, than the median of the others in the same iteration, which sees who was slow all the time; else than in the
   rest of the iterations, both by itself and over the others.

The noise is measured on the series itself, as both readings would otherwise take a restless machine for a slow one. Where both
name an episode, that of (2) counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import exp, log

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Findings, Sight, percent, times_as_long
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.detector.detector import Detector, sight_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, company_of, equal_roles, median_of_others
from unskew.analytics.detector.residuals import Flags, Floats, UnitTimes
from unskew.analytics.detector.series.by_chance import chance_beside
from unskew.analytics.detector.series.stretches import Stretch, Stretches, StretchTest, steady_sigma, stretches_of
from unskew.analytics.detector.verdicts import Excess, SpeedChange, slow_verdict
from unskew.collector.events import Verdict

BY_CHANCE = 1e-3
PACES = (0.2, 0.5)
"""What share of a rank's iterations is shorter than its pace: by which others are long is not known where many are."""
OR_ITS_DATA = "or its data is always heavier than the others', as no lengths are recorded"
MANY_OTHERS = 3
"""The median of fewer moves with one of them: while that is slow the others look fast."""
LEAST_US = 1e-3
LEAST_MOVE = 1e-6


class RankTimes(msgspec.Struct, frozen=True, dict=True):
    """`us` [kind, iteration, rank], nan = not seen. The ranks are the keys of `role_of`; those of one role do the same work."""

    kinds: tuple[str, ...]
    iterations: tuple[int, ...]
    role_of: dict[int, int]
    us: Floats


def judge_workers(
    times: RankTimes, options: DetectorOptions, *, equal_work: bool, lengths_known: bool = False, least: int | None = None
) -> Findings:
    """Who is slow, and how slow one would have to be to be named. `equal_work`: whether (2) knows what is healthy from the
    others; `lengths_known`: times are over what the data lets expect, so a rank's data is no excuse. `least`: so few iterations
    may suffice (None = those of the options) where the slowdown is larger (`level_of_few`)."""
    company = company_of(equal_roles(times.role_of), tuple(times.role_of))
    over = _over_others(times, company)
    readings = over[None] if equal_work else np.stack([_logs(times), over])
    noise = _noise(readings)
    least = options.least_iterations if least is None else least
    test = StretchTest.of(len(times.iterations), len(times.role_of), least=least, against_rest=not equal_work)
    young = len(times.iterations) < options.own_past
    spread = np.maximum(noise, options.sigma_floor)
    stretches = _stretches(times, readings, spread, test, options.least_level(young=young))
    for (kind, rank), one in stretches.items():
        spread[~np.isnan(noise[:, kind, rank]), kind, rank] *= one.wider
    known = spread[-1][~np.isnan(spread[-1])]
    floor = float(known.max() if len(known) else np.nanmax(spread, initial=options.sigma_floor))
    detected, sight = _changes(times, msgspec.structs.replace(options, sigma_floor=floor))
    over_calm = _over_others(times, company, _within(times, stretches))
    compared, passed = _slower(
        times, readings, over_calm, noise, company,
        options=options, stretches=stretches, test=test, lengths_known=lengths_known,
    )  # fmt: skip
    alone = [one for one in detected if not any(_same_episode(one, other) for other in compared)]
    by_itself = _by_itself(times, [*compared, *alone], over, equal_work=equal_work)
    kept = [one for one in (*compared, *alone) if one not in by_itself]
    found = sorted(kept, key=lambda one: (one.since_iteration, min(one.speed.values(), default=1.0)))  # slowest first
    verdicts = tuple(msgspec.structs.replace(one, verdict=number) for number, one in enumerate(found, start=1))
    seen = _seen(times, spread, test, options)
    sight = _sight(times, over, sight, seen) if equal_work else _of_own_past(times, seen, options)
    sight = _unless_most_are_slow(times, over, sight, spread=spread[-1:], test=test, found=found)
    if passed:
        sight = Sight(scope="device", smallest_slowdown=None, why=_or_others_are_fast(passed))
    if by_itself:
        ranks = sorted({str(party.rank) for one in by_itself for party in one.culprits})
        why = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} took as long for a while, as single iterations do now and then"
        sight = Sight(scope="device", smallest_slowdown=None, why=why)
    return Findings(verdicts=verdicts, sight=sight)


def level_of_few(options: DetectorOptions, n: int, *, young: bool = False) -> float:
    """Log of the smallest slowdown that is named by n iterations: of fewer than `least_iterations` it grows as the error of
    their mean does, as healthy ranks are disturbed for some iterations."""
    return options.least_level(young=young) + max(log(options.least_iterations / n), 0.0) / 2


def _same_episode(one: Verdict, other: Verdict) -> bool:
    """Whether both are about one slowness of one rank."""
    ends = [verdict.at_iteration if verdict.until_iteration is None else verdict.until_iteration for verdict in (one, other)]
    return one.culprits == other.culprits and one.since_iteration <= ends[1] and other.since_iteration <= ends[0]


def _by_itself(times: RankTimes, episodes: Sequence[Verdict], over: Floats, *, equal_work: bool) -> list[Verdict]:
    """Of `episodes` those that come by chance, as single iterations are often as long: those of all ranks that are in no
    episode, or in one that came by chance, say how often."""
    alone = np.isnan(over).all(axis=1, keepdims=True)
    readings = np.where(alone, _logs(times), over)
    left = judged = [one for one in episodes if one.speed]  # a stage has none
    while left:
        calm = readings.copy()
        for one in left:
            column = _column(times, one)
            moved = [column] if equal_work else [column, *_few_others(times, column)]
            calm[:, np.flatnonzero(_during(times, one))[:, None], moved] = np.nan
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # one is slow all the time
            paces = np.nan_to_num(np.nanquantile(calm, PACES, axis=1, keepdims=True))
        paces = np.where(alone | (not equal_work), paces, 0.0)
        before, left = left, [one for one in left if _chance(times, one, readings, calm, paces) <= BY_CHANCE]
        if len(left) == len(before):
            break
    return [one for one in judged if one not in left]


def _chance(times: RankTimes, one: Verdict, readings: Floats, calm: Floats, paces: Floats) -> float:
    """How many such episodes are to be expected, by whichever pace excuses more; `paces` [pace, kind, 1, rank]."""
    kind, column = times.kinds.index(min(one.speed, key=lambda kind: one.speed[kind])), _column(times, one)
    stretch = readings[kind, _during(times, one), column]
    return max(chance_beside(stretch - pace[kind, 0, column], calm[kind] - pace[kind]) for pace in paces)


def _column(times: RankTimes, verdict: Verdict) -> int:
    return list(times.role_of).index(verdict.culprits[0].rank or 0)


def _few_others(times: RankTimes, column: int) -> list[int]:
    """The others of its role, where these are so few that one of them moves what they are compared with."""
    roles = list(times.role_of.values())
    others = [other for other, role in enumerate(roles) if role == roles[column] and other != column]
    return others if len(others) < MANY_OTHERS else []


def _during(times: RankTimes, verdict: Verdict) -> Flags:
    """Which iterations are its episode."""
    ends = np.inf if verdict.until_iteration is None else verdict.until_iteration
    return np.array([verdict.since_iteration <= one < ends for one in times.iterations])


def _over_others(times: RankTimes, company: PeerGroups, slow: Flags | None = None) -> Floats:
    """[kind, iteration, rank]: log of the time over the median of the other ranks of the role; nan where there are none. Those
    that are `slow` are nobody's measure while others are left: one of three makes their median the longer of the two."""
    n_kinds, n_iterations, n_ranks = times.us.shape
    columns = _logs(times).transpose(2, 0, 1).reshape(n_ranks, -1)
    others, _ = median_of_others(columns, company.peer_groups)
    if slow is not None:
        healthy = np.where(slow.transpose(2, 0, 1).reshape(n_ranks, -1), np.nan, columns)
        of_healthy, n_healthy = median_of_others(healthy, company.peer_groups)
        others = np.where(n_healthy > 0, of_healthy, others)
    return (columns - others).reshape(n_ranks, n_kinds, n_iterations).transpose(1, 2, 0)


def _within(times: RankTimes, stretches: Mapping[tuple[int, int], Stretches]) -> Flags:
    """[kind, iteration, rank]: whether a stretch of the rank is on."""
    slow = np.zeros(times.us.shape, dtype=bool)
    for (kind, column), found in stretches.items():
        for one in found.found:
            slow[kind, one.begin : one.end, column] = True
    return slow


def _logs(times: RankTimes) -> Floats:
    return np.log(np.maximum(times.us, LEAST_US))


def _noise(readings: Floats) -> Floats:
    """[reading, kind, rank]: the usual one, times what neighbours in time differ by more than usual; nan = nothing is known.
    Neither a slow rank nor a slow stretch of it is noise by that."""
    steady = np.apply_along_axis(steady_sigma, 2, readings)
    steady[np.isnan(readings).all(axis=2)] = np.nan
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # ranks that have nobody beside them
        moves = np.nanmedian(np.abs(np.diff(readings, axis=2)), axis=2) if readings.shape[2] > 1 else np.ones_like(steady)
        usual, usual_moves = (np.nanquantile(of, 0.5, axis=2, method="lower", keepdims=True) for of in (steady, moves))
        return np.asarray(np.where(np.isnan(steady), np.nan, usual * np.fmax(moves / np.maximum(usual_moves, LEAST_MOVE), 1.0)))


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


def _stretches(
    times: RankTimes, readings: Floats, noise: Floats, test: StretchTest, least_level: float
) -> dict[tuple[int, int], Stretches]:
    """(kind, rank), both counted from 0 -> the stretches in which it took longer; without what nothing is known of. One of few
    looks fast while another is slow, which is no noise of its own."""

    def of(kind: int, rank: int, apart: Sequence[Stretch] = ()) -> Stretches:
        known = ~np.isnan(noise[:, kind, rank])
        return stretches_of(readings[known, kind, :, rank], noise[known, kind, rank], test, least_level, apart)

    found = {(kind, rank): of(kind, rank) for kind, rank in np.argwhere(~np.isnan(noise).all(axis=0)).tolist()}
    again = {}
    for kind, rank in found:
        others = [other for other in _few_others(times, rank) if (kind, other) in found]
        if apart := [one for other in others for one in found[kind, other].found]:
            again[kind, rank] = of(kind, rank, apart)
    return found | again


def _slower(
    times: RankTimes,
    readings: Floats,
    over_calm: Floats,
    noise: Floats,
    company: PeerGroups,
    *,
    options: DetectorOptions,
    stretches: Mapping[tuple[int, int], Stretches],
    test: StretchTest,
    lengths_known: bool,
) -> tuple[list[Verdict], dict[int, float]]:
    """A verdict on each episode of a rank that took longer: than the others of its role, or than it does else. How slow it was
    is stated over those alone that are in no episode (`over_calm`), and that names it where it took longer over all others too
    (`readings`) or than it does else: else one that is named would let others pass that are as long as ever. Also rank -> log
    of how much longer one took that passed so."""
    n = len(times.iterations)
    least = options.least_level(young=n < options.own_past)
    sizes, moves = np.concatenate([readings[:-1], over_calm[None]]), np.stack([_logs(times), over_calm])
    verdicts: list[Verdict] = []
    passed: dict[int, float] = {}
    for column, rank in enumerate(times.role_of):
        known = {kind: ~np.isnan(noise[:, k, column]) for k, kind in enumerate(times.kinds)}
        if not all(one.any() for one in known.values()):
            continue
        sigmas = {kind: np.maximum(noise[known[kind], k, column], options.sigma_floor) for k, kind in enumerate(times.kinds)}
        found = [(one, kind) for k, kind in enumerate(times.kinds) for one in stretches[k, column].found]
        healthy = np.ones(n, dtype=bool)
        for one, _ in found:
            healthy[one.begin : one.end] = False
        taken: list[Stretch] = []
        for one, kind in sorted(found, key=lambda item: -item[0].over):
            if any(one.begin < other.end and other.begin < one.end for other in taken):
                continue
            k = times.kinds.index(kind)
            rest = healthy if test.against_rest else None
            levels = {name: _level(sizes[known[name], i, :, column], one, rest) for i, name in enumerate(times.kinds)}
            shown = _level(readings[known[kind], k, :, column], one, rest)
            moved = _level(moves[:, k, :, column], one, healthy) if healthy.sum() >= test.least else 0.0
            needed = level_of_few(options, one.end - one.begin, young=n < options.own_past)
            if max(shown, min(levels[kind], moved)) < needed:
                if levels[kind] >= needed:
                    passed[rank] = max(levels[kind], passed.get(rank, 0.0))
                continue
            taken.append(one)
            slacks = {k: max(least / 2, options.slack_of(float(sigma.max()))) for k, sigma in sigmas.items()}
            change = SpeedChange(
                since=times.iterations[one.begin],
                iterations=one.end - one.begin,
                test=kind,
                cusum=one.over,
                threshold=1.0,
                levels={k: level for k, level in levels.items() if level >= slacks[k] or k == kind},
                excess={k: Excess(level, level) for k, level in levels.items()},
            )
            verdict = slow_verdict(
                1, rank, change, kinds=len(times.kinds), victims=company.data_parallel_peers[rank], at=times.iterations[-1],
                sigma=float(sigmas[kind].max()), episodes=1, options=options,
            )  # fmt: skip
            if n - one.end >= options.least_iterations:
                verdict = msgspec.structs.replace(verdict, until_iteration=times.iterations[one.end])
            alike = len(verdict.speed) == len(times.kinds) and min(levels.values()) >= max(levels.values()) / 2
            always = one.begin == 0 and verdict.until_iteration is None
            unsure = always and alike and not lengths_known and not test.against_rest
            verdicts.append(_or_its_data(verdict) if unsure else verdict)
    named = {party.rank for one in verdicts for party in one.culprits}
    return verdicts, {rank: level for rank, level in passed.items() if rank not in named}


def _or_others_are_fast(passed: Mapping[int, float]) -> str:
    """Why who took longer than those in no episode, and not than all others, nor than it does else, is not named."""
    ranks, times = ", ".join(map(str, sorted(passed))), times_as_long(exp(max(passed.values())))
    who = f"rank {ranks} takes" if len(passed) == 1 else f"ranks {ranks} take up to"
    they = "it is" if len(passed) == 1 else "they are"
    than = "as the calmest ranks with the same layers, but no longer than most of them"
    return f"{who} {times} {than}: {they} slow, or these are fast"


def _level(readings: Floats, one: Stretch, healthy: Flags | None) -> float:
    """The typical excess in a stretch, over that where it is `healthy`, by the reading that says least."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a kind of work may not be seen in it
        inside = np.nanmedian(readings[:, one.begin : one.end], axis=1)
        rest = np.nanmedian(readings[:, healthy], axis=1) if healthy is not None else 0.0
    return float(np.nan_to_num((inside - rest).min(), nan=0.0))


def _of_own_past(times: RankTimes, sight: Sight, options: DetectorOptions) -> Sight:
    """Where a rank differs from its peers from the first iterations on it or they may be slow, or have more to do: then nobody
    is well."""
    if sight.smallest_slowdown is None:
        return sight
    own, role = np.nanmedian(times.us[0, : options.own_past], axis=0), np.array(list(times.role_of.values()))
    own = np.maximum(own, LEAST_US)
    ratio = own / np.array([np.nanpercentile(own[role == one], 50, method="lower") for one in role])
    furthest = int(np.nanargmax(np.abs(np.log(ratio))))
    if exp(abs(log(ratio[furthest]))) < sight.smallest_slowdown:
        return sight
    which = "it is slow or has more to do" if ratio[furthest] > 1 else "they are slow or have more to do"
    why = (
        f"rank {list(times.role_of)[furthest]} takes {times_as_long(ratio[furthest])} as its peers from the first "
        f"iterations on: {which}, and the log does not show which"
    )
    return Sight(scope=sight.scope, smallest_slowdown=None, why=why)


def _unless_most_are_slow(
    times: RankTimes, over: Floats, sight: Sight, *, spread: Floats, test: StretchTest, found: Sequence[Verdict]
) -> Sight:
    """Where most ranks of a role are slow together their median is, so that nobody is longer and the few healthy ones look
    fast: by as much as would be named, while nobody is, one that does leaves open which it is."""
    if sight.smallest_slowdown is None:
        return sight
    least, ranks = log(sight.smallest_slowdown), list(times.role_of)
    named = np.any([_during(times, one) for one in found], axis=0) if found else np.zeros(len(times.iterations), dtype=bool)
    for (kind, column), stretches in _stretches(times, -over[None], spread, test, least).items():
        rest = np.ones(len(times.iterations), dtype=bool)
        for one in stretches.found:
            rest[one.begin : one.end] = False
        for one in stretches.found:
            level = _level(-over[None, kind, :, column], one, None)
            if test.against_rest:  # it may be the faster one all the time
                level = min(level, _level(-over[None, kind, :, column], one, rest))
            if level >= least and not named[one.begin : one.end].any():
                since, until = (times.iterations[at] for at in (one.begin, one.end - 1))
                why = (
                    f"rank {ranks[column]} takes {times_as_long(exp(-level))} as the others in iterations {since} to {until}: "
                    "it is fast, or they are slow"
                )
                return Sight(scope=sight.scope, smallest_slowdown=None, why=why)
    return sight


def _or_its_data(verdict: Verdict) -> Verdict:
    """Slow in all its work alike and all the time: a device, or what it is given."""
    return msgspec.structs.replace(
        verdict, sentence=f"{verdict.sentence}, {OR_ITS_DATA}", confidence=min(verdict.confidence, 0.5)
    )


def _seen(times: RankTimes, spread: Floats, test: StretchTest, options: DetectorOptions) -> Sight:
    """What (2) would have named of any rank."""
    n, needed = len(times.iterations), options.least_iterations * (3 if test.against_rest else 1)
    if n < needed:
        return Sight(scope="device", smallest_slowdown=None, why=f"{n} iteration{'s' * (n != 1)}, at least {needed} are needed")
    sigma = float(np.nanmax(spread, initial=options.sigma_floor))
    settled = msgspec.structs.replace(test, least=options.least_iterations)
    level = settled.smallest(n, sigma, options.least_level(young=n < options.own_past))
    return Sight(scope="device", smallest_slowdown=round(exp(level), 3))


def _sight(times: RankTimes, over: Floats, of_changes: Sight, seen: Sight) -> Sight:
    """Of a rank that has nobody to be compared with only changes are seen."""
    alone = np.isnan(over).all(axis=1).any(axis=0)
    number = list(times.role_of)[int(np.argmax(alone))]
    if alone.any() and of_changes.sees:
        why = (
            f"rank {number} shares its work with no other, so slow from the first iterations on "
            "it looks like one that has more to do; one that turned slow later by "
            f"{percent(of_changes.smallest_slowdown or 1.0)} or more would have been named"
        )
        return Sight(scope="device", smallest_slowdown=None, why=why)
    return of_changes if alone.any() else seen
