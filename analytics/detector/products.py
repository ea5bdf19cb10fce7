"""What a device's own matrix product changes in what is estimated of it: of a suspect that is probed, of a rank on standby.

Ranks that are slower than their own past and excused by their peers are measured while training waits (`suspected_ranks`,
`confirm`; docs/internals/probes.md). One product decides.

On standby are slow devices that the plan does better without; the same for ranks that hold their layers as a spare copy. Such a
rank executes nothing, so the log has nothing about it. It multiplies its matrix now and then, while the others train
(docs/internals/standby.md), and the time over the one when the run began is its slowdown. One measurement decides nothing:

* healthy again, when the last few are all below what is named as slow; how many doubles with each time that the rank was slow,
  so that one that goes to and fro comes back ever more rarely;
* slower or less slow than was estimated, when the last two agree on it: the estimated speed is their middle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import log
from statistics import median

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.detector_state import DetectorState, Verdicts, flag_rank, waiting_for
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import ALL
from unskew.analytics.detector.tracks import Tracks
from unskew.analytics.detector.verdicts import Excess, SpeedChange
from unskew.collector.events import Verdict, VerdictClosed

AGREE = 2
_MOST_DOUBLINGS = 5


def suspected_ranks(state: DetectorState, options: DetectorOptions, over: int = 8) -> dict[int, float]:
    """Ranks that are slower than their own past and prediction, and are not flagged because data-parallel or pipeline peers
    are as well: rank -> median own excess (log) over the last `over` iterations, where it is as much as is named. A probe
    can decide where `options.probes`, elsewhere nobody is suspected."""
    tracks = state.tracks
    if not options.probes or options.method != "unskew" or len(tracks.recent) < over or ALL not in tracks.kinds:
        return {}
    own = np.stack([seen.excess[0, :, tracks.kinds.index(ALL)] for seen in tracks.recent[-over:]])
    known = np.flatnonzero(~np.isnan(own).any(axis=0)).tolist()
    middle = {tracks.ranks[row]: float(np.median(own[:, row])) for row in known}
    known_slow = {*state.open, *(rank for rank, at in state.acquitted.items() if at > state.iteration - over)}
    return {rank: level for rank, level in middle.items() if level >= options.least_level() and rank not in known_slow}


def uncontradicted(
    state: DetectorState,
    ranks: Collection[int],
    plan: Plan,
    options: DetectorOptions,
    class_of: Mapping[int, str],
) -> frozenset[int]:
    """Of ranks that were slow by their products when the run began those who execute under the plan in force, are not flagged,
    and whose role nobody else plays on a device of its class (`class_of`), in a group of its size: of the others chunks tell,
    and what such a group takes is learned from its own. Another product decides, also where no probe may alone (not
    `options.probes`): two then agree, as each took at least what is named (`references`, `confirm`). Only our Detector asks."""
    if options.method != "unskew":
        return frozenset()
    peers = {} if state.company is None else state.company.data_parallel_peers
    others = plan.executors.difference(ranks)
    mine = plan.executors.intersection(ranks).difference(state.open)

    def priced_as(rank: int) -> tuple[str | None, int]:
        return class_of.get(rank), len(plan.team_of.get(rank, (rank,)))

    return frozenset(
        rank for rank in mine if not any(peer in others and priced_as(peer) == priced_as(rank) for peer in peers.get(rank, ()))
    )


def slow_or_expensive(ranks: Collection[int], plan: Plan, first: int) -> Sight:
    """What keeps us from calling devices well while nobody has contradicted these ranks. `first`: the run's first iteration."""
    stages = {role.stage for role in plan.roles if role.rank in ranks}
    why = (
        f"{_are('stage', stages)} dear or {_are('rank', ranks)} slow since iteration {first}: one product was long when the "
        "run began, and no probe measured another"
    )
    return Sight(scope="device", smallest_slowdown=None, why=why)


def _are(what: str, numbers: Collection[int]) -> str:
    """
    >>> _are("rank", {2}), _are("rank", {3, 2})
    ('rank 2 is', 'ranks 2, 3 are')
    """
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))} {'are' if len(numbers) > 1 else 'is'}"


def confirm(
    state: DetectorState, rank: int, ratio: float, iteration: int, options: DetectorOptions, *, since: int | None = None
) -> tuple[DetectorState, Verdicts]:
    """A probe of `rank` took `ratio` times as long as on a healthy device: a verdict on all its kinds of work, if that is as
    much as is named and the rank is not flagged already. `since`: the iteration in which the run began, of a rank that was slow
    then and alone in its role: all that it ever showed was slow. Where the product is more than the rank's work shows over
    its role, the rest was learned as what the role costs, and is no cost of it."""
    tracks = state.tracks
    if rank in state.open or rank not in tracks.ranks or log(ratio) < options.least_level():
        return state, ()
    revised = _role_revised(tracks, tracks.ranks.index(rank), log(ratio), options, always=since is not None)
    state = msgspec.structs.replace(state, tracks=revised)
    return flag_by_ratio(
        state, rank, log(ratio), options,
        since=iteration if since is None else since, at=iteration, iterations=1, sigma=options.sigma_floor,
        victims=waiting_for(state, rank),
    )  # fmt: skip


def _role_revised(tracks: Tracks, row: int, level: float, options: DetectorOptions, *, always: bool) -> Tracks:
    """The role of the rank at `row`, that is slow by `level`, costs as much less as the rank's work hides of that; if it
    `always` was, the predictor has learned of it what the role has not."""
    shown = np.array([seen.excess[0, row] for seen in tracks.recent])
    role = tracks.role.copy()
    for kind in np.flatnonzero(~np.isnan(shown).all(axis=0)) if len(shown) else ():
        hidden = level - float(np.nanmedian(shown[:, kind]))
        hidden = hidden if always else min(hidden, float(role[row, kind]))
        role[row, kind] -= hidden if hidden >= options.least_level(young=True) else 0.0
    return msgspec.structs.replace(tracks, role=role)


def welcome(
    state: DetectorState, rank: int, slowdown: float, iteration: int, options: DetectorOptions
) -> tuple[DetectorState, Verdicts]:
    """A rank that was lost is there again, or a new one is, and its product took `slowdown` times as long as a healthy one:
    the verdict on its loss is closed, and a new one says that it is slow, if that is as much as is named."""
    verdicts: list[Verdict | VerdictClosed] = []
    if rank in state.lost:
        reason = f"rank {rank} is there again since iteration {iteration + 1}"
        number, until = state.lost[rank], iteration + 1
        verdicts.append(VerdictClosed(verdict=number, until_iteration=until, at_iteration=iteration, reason=reason))
    still = {gone: number for gone, number in state.lost.items() if gone != rank}
    tracks = state.tracks.covering((rank,), (), iteration) if state.tracks.kinds else state.tracks
    state = msgspec.structs.replace(state, lost=still, tracks=tracks)
    if log(slowdown) >= options.least_level() and tracks.kinds:
        state, slow = flag_by_ratio(
            state, rank, log(slowdown), options,
            since=iteration + 1, at=iteration, iterations=1, sigma=options.sigma_floor, victims=(),
        )  # fmt: skip
        verdicts += slow
    return state, tuple(verdicts)


class StandbyReading(msgspec.Struct, frozen=True):
    """One measurement of a rank on standby: the iteration that the others were in, and its time over the healthy one."""

    iteration: int
    slowdown: float


def concluded(readings: Sequence[StandbyReading], estimated: float, episodes: int, least: float) -> tuple[StandbyReading, ...]:
    """The last readings that agree on another slowdown than the `estimated` one; () while they do not.

    `episodes`: how often the rank has been slow; `least`: the slowdown from which a device is called slow.

    >>> six, one = StandbyReading(40, 6.0), StandbyReading(50, 1.0)
    >>> concluded([six, one], 6.0, 1, 1.15)
    ()
    >>> [reading.iteration for reading in concluded([six, one, StandbyReading(60, 1.02)], 6.0, 1, 1.15)]
    [50, 60]
    """
    last = tuple(readings[-AGREE:])
    slowdowns = [reading.slowdown for reading in last]
    if len(last) < AGREE:
        return ()
    if min(slowdowns) >= least:
        return last if max(slowdowns) * least <= estimated or min(slowdowns) >= estimated * least else ()
    patience = AGREE << min(max(episodes - 1, 0), _MOST_DOUBLINGS)
    healthy = tuple(readings[-patience:])
    agree = estimated > 1.0 and len(healthy) == patience and all(reading.slowdown < least for reading in healthy)
    return healthy if agree else ()


def update_estimate(
    state: DetectorState, rank: int, readings: Sequence[StandbyReading], iteration: int, options: DetectorOptions
) -> tuple[DetectorState, Verdicts]:
    """What the detector estimates of `rank` after these readings, with the verdict that results: revised, closed, or new.

    As before and no verdict while the readings conclude nothing. `iteration`: the last one judged.
    """
    estimated = 1.0 / min(state.speeds.get(rank, {}).values(), default=1.0)
    agreed = concluded(readings, estimated, state.episodes.get(rank, 0), options.least_slowdown)
    if not agreed or rank not in state.tracks.ranks:
        return state, ()
    slowdown = median(reading.slowdown for reading in agreed)
    if slowdown < options.least_slowdown:
        if unseen_by_product(state, rank) and all(reading.slowdown < options.least_slowdown for reading in readings):
            return state, ()
        since = agreed[0].iteration
        why = f"rank {rank}, measured on standby, is back at its healthy speed since iteration {since}"
        return acquit(state, rank, since, iteration, why)
    sigma = max(state.noise.get(ALL, 0.0), options.sigma_floor)
    return flag_by_ratio(
        state, rank, log(slowdown), options,
        since=agreed[0].iteration, at=iteration, iterations=AGREE, sigma=sigma, victims=(),
    )  # fmt: skip


def unseen_by_product(state: DetectorState, rank: int) -> bool:
    """Whether the rank is slow in other work than forward passes, by what is estimated: its product, which is one, may be
    healthy all the while."""
    return rank in state.open and "F" not in state.speeds.get(rank, {"F": 1.0})


def acquit(state: DetectorState, rank: int, since: int, iteration: int, reason: str) -> tuple[DetectorState, Verdicts]:
    """The rank is healthy again since iteration `since`; what is open against it is closed."""
    tracks = state.tracks
    closed = [
        VerdictClosed(verdict=number, until_iteration=since, at_iteration=iteration, reason=reason)
        for flagged, number in state.open.items()
        if flagged == rank
    ]
    return msgspec.structs.replace(
        state,
        tracks=tracks.with_levels(tracks.ranks.index(rank), np.zeros(len(tracks.kinds)), iteration),
        open={flagged: number for flagged, number in state.open.items() if flagged != rank},
        acquitted={**state.acquitted, rank: iteration},
    ), tuple(closed)


def flag_by_ratio(
    state: DetectorState,
    rank: int,
    level: float,
    options: DetectorOptions,
    *,
    test: str = "probe",
    since: int,
    at: int,
    iterations: int,
    sigma: float,
    victims: Collection[int],
) -> tuple[DetectorState, Verdicts]:
    """The verdict from a rank's matrix product, or from another ratio of all its work: all kinds of it are as slow (log) as
    that, nothing distinguishes them."""
    tracks = state.tracks
    kinds = (*(tracks.kinds_of(rank) or tracks.kinds[:-1]), ALL)
    change = SpeedChange(
        since=since,
        iterations=iterations,
        test=test,
        cusum=level,
        threshold=options.least_level(),
        levels=dict.fromkeys(kinds, level),
        excess=dict.fromkeys(kinds, Excess(level)),
    )
    levels = np.array([level if kind in kinds else 0.0 for kind in tracks.kinds])
    state = msgspec.structs.replace(state, tracks=tracks.with_levels(tracks.ranks.index(rank), levels, at))
    return flag_rank(state, rank, change, at, options, sigma=sigma, victims=victims)
