"""Slow links, live: the transfers of committed iterations, one after the other -> links that turned slow or are healthy again.

A transfer's time runs from the moment both sides were there, so nobody's lateness is in it. Per link (sender, receiver) and
iteration, with the median over its transfers (those whose time is whole, where there are any):

1. excess = log(time / the link's own usual time) less the median excess of the other links: what all links suffer together is
   nobody's fault here. To both times is added what a message may take before its link's messages cost `least_share` of the
   iteration: times that short are noise;
2. a CUSUM of the clipped excess in sigmas (cusum.py): no single iteration fires, however bad;
3. it fires, and the median excess since its last zero is at least `least_slowdown`, and the time lost is at least
   `least_share` of the iteration: a link that is slow but carries little flags nobody.

The usual time is the median of the first `learn` iterations; their spread is the link's sigma, where it is above `sigma`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, log
from statistics import fmean, median

import msgspec
import numpy as np

from unskew.analytics.core.iteration import Transfer
from unskew.analytics.detector.cusum import CusumSide

Link = tuple[int, int]
_SD_OF_MEAN_DEVIATION = 1.2533


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`sigma`: of the log of an iteration's median transfer on a healthy link, at least; the sums are in sigmas."""

    learn: int = 10
    sigma: float = 0.15
    clip: float = 4.0
    slack: float = 1.0
    threshold: float = 12.0
    least_slowdown: float = 1.5
    least_share: float = 0.02
    window: int = 50


class LinkTrack(msgspec.Struct, frozen=True):
    """What is remembered of a link: its first times, then its usual one and its spread; the sum; the excesses since the sum's
    last zero; `level`: the excess estimated while it is slow, 0 while it is healthy; `longer_us`: by how much its messages took
    longer than the usual time, as often as the other links show, in the last iterations that count for either.
    """

    first_us: tuple[float, ...] = ()
    usual_us: float | None = None
    sigma: float = 0.0
    sum: float = 0.0
    since: int = -1
    excesses: tuple[float, ...] = ()
    longer_us: tuple[float, ...] = ()
    level: float = 0.0

    @property
    def slow(self) -> bool:
        return self.level > 0.0

    @property
    def more_us(self) -> float:
        """What a message takes longer."""
        return max(median(self.longer_us), 0.0) if self.longer_us else 0.0


class LinkChange(msgspec.Struct, frozen=True, kw_only=True):
    """A link turned slow (`slow`) or is healthy again; `ratio`: its time over its usual one, median of `n` iterations;
    `more_us`: what a message takes longer; `lost_share`: what all its messages do, as a share of the iteration.
    """

    link: Link
    slow: bool
    since: int
    ratio: float
    more_us: float
    n: int
    lost_share: float


Tracks = dict[Link, LinkTrack]


def watch(
    tracks: Tracks, iteration: int, iteration_us: float, transfers: Iterable[Transfer], options: LinkOptions | None = None
) -> tuple[Tracks, tuple[LinkChange, ...]]:
    """One committed iteration further; `tracks` is not changed."""
    options = options or LinkOptions()
    seen: dict[Link, list[Transfer]] = {}
    for transfer in transfers:
        seen.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    after = dict(tracks)
    logs, little = {}, {}
    for link, of_link in seen.items():
        whole = [one.us for one in of_link if one.whole] or [one.us for one in of_link]
        us, track = max(median(whole), 1.0), after.get(link, LinkTrack())
        little[link] = options.least_share * iteration_us / len(of_link)
        if track.usual_us is None:
            after[link] = _learned(msgspec.structs.replace(track, since=iteration), us, little[link], options)
        else:
            logs[link] = log((us + little[link]) / (track.usual_us + little[link]))
    links = sorted(logs)
    excess = np.array([logs[link] - _common(logs, link) for link in links])
    before = [after[link] for link in links]
    level = np.array([track.level for track in before])
    # What contradicts the present estimate: lateness on a healthy link, punctuality on a slow one.
    sigma = np.array([max(track.sigma, options.sigma) for track in before])
    z = np.clip(np.where(level > 0, level / 2 - excess, excess) / sigma, -options.clip, options.clip)
    sums = CusumSide(np.array([track.sum for track in before]), np.array([track.since for track in before], dtype=np.int64))
    sums = sums.advance(iteration, z - options.slack)
    changes = []
    for number, link in enumerate(links):
        usual_us = before[number].usual_us or 0.0
        base_us = usual_us + little[link]
        sizes = _Sizes(usual_us, base_us * (exp(logs[link]) - exp(logs[link] - excess[number])), len(seen[link]) / iteration_us)
        track = msgspec.structs.replace(before[number], sum=float(sums.total[number]), since=int(sums.zero_at[number]))
        after[link], change = _judged(track, iteration, float(excess[number]), options, link=link, sizes=sizes)
        changes += [change] if change else []
    return after, tuple(changes)


class _Sizes(msgspec.Struct, frozen=True):
    """Of a link's messages in an iteration: the usual time of one, what one took longer, how many of them a us."""

    usual_us: float
    longer_us: float
    per_us: float


def _learned(track: LinkTrack, us: float, little_us: float, options: LinkOptions) -> LinkTrack:
    """With one of the first times; with the last of them it has its usual one."""
    first = (*track.first_us, us)
    if len(first) < options.learn:
        return msgspec.structs.replace(track, first_us=first)
    usual_us = median(first)
    spread = fmean(abs(log((one + little_us) / (usual_us + little_us))) for one in first)
    return msgspec.structs.replace(track, first_us=(), usual_us=usual_us, sigma=_SD_OF_MEAN_DEVIATION * spread)


def _common(logs: Mapping[Link, float], link: Link) -> float:
    """What the other links show, if there are two or more."""
    others = [value for other, value in logs.items() if other != link]
    return median(others) if len(others) > 1 else 0.0


def _judged(
    track: LinkTrack, iteration: int, excess: float, options: LinkOptions, *, link: Link, sizes: _Sizes
) -> tuple[LinkTrack, LinkChange | None]:
    """What the link's sum says now."""
    longer_us = (*track.longer_us[1 - options.window :], sizes.longer_us) if track.slow or track.sum > 0 else ()
    track = msgspec.structs.replace(track, longer_us=longer_us)
    if track.sum <= 0:
        return msgspec.structs.replace(track, excesses=()), None
    recent = (*track.excesses[1 - options.window :], excess)
    level = median(recent)
    more_us = track.more_us if not track.slow else max(median(longer_us[-len(recent) :]), 0.0)
    lost_share = more_us * sizes.per_us
    if track.slow:
        turned = level < track.level / 2
    else:
        turned = level >= log(options.least_slowdown) and lost_share >= options.least_share
    if track.sum < options.threshold or not turned:
        return msgspec.structs.replace(track, excesses=recent), None
    change = LinkChange(
        link=link,
        slow=not track.slow,
        since=track.since + 1,
        ratio=1 + more_us / max(sizes.usual_us, 1.0),
        more_us=more_us,
        n=len(recent),
        lost_share=lost_share,
    )
    if track.slow:
        return msgspec.structs.replace(track, sum=0.0, since=iteration, excesses=(), longer_us=(), level=0.0), change
    return msgspec.structs.replace(track, sum=0.0, since=iteration, excesses=(), level=level), change
