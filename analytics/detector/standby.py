"""Ranks on standby: slow devices that the plan does better without. What their own measurements change in what is estimated.

The same for ranks that hold their layers as a spare copy and execute nothing.

Such a rank executes nothing, so the log has nothing about it. It multiplies its matrix now and then, while the others train
(docs/internals/standby.md), and the time over the one when the run began is its slowdown. One measurement decides nothing:

* healthy again, when the last few are all below what is named as slow; how many doubles with each time that the rank was slow,
  so that one that goes to and fro comes back ever more rarely;
* slower or less slow than was estimated, when the last two agree on it: the estimated speed is their middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

import msgspec
import numpy as np

from unskew.analytics.detector.detector import DetectorState, Verdicts, by_product
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import ALL
from unskew.collector.events import VerdictClosed

AGREE = 2
_MOST_DOUBLINGS = 5


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
        return _healthy(state, rank, agreed[0].iteration, iteration)
    sigma = max(state.noise.get(ALL, 0.0), options.sigma_floor)
    return by_product(
        state, rank, log(slowdown), options,
        since=agreed[0].iteration, at=iteration, iterations=AGREE, sigma=sigma, victims=(),
    )  # fmt: skip


def _healthy(state: DetectorState, rank: int, since: int, iteration: int) -> tuple[DetectorState, Verdicts]:
    tracks = state.tracks
    reason = f"rank {rank}, measured on standby, is back at its healthy speed since iteration {since}"
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
