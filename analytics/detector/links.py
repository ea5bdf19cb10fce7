"""Slow links, live: the transfers of committed iterations, one after the other -> links that turned slow or are healthy again.

A transfer's time runs from the moment both sides were there, so nobody's lateness is in it. Per link (sender, receiver) and
iteration, with the median over its transfers:

1. excess = log(time / the link's own usual time) less the median excess of the other links: what all links suffer together is
   nobody's fault here;
2. a CUSUM of the clipped excess in sigmas (cusum.py): no single iteration fires, however bad;
3. it fires, and the median excess since its last zero is at least `least_slowdown`, and the time lost is at least
   `least_share` of the iteration: a link that is slow but carries little flags nobody.

The usual time is the median of the first `learn` iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, log
from statistics import median

import msgspec
import numpy as np

from unskew.analytics.core.iteration import Transfer
from unskew.analytics.detector.cusum import CusumSide

Link = tuple[int, int]


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`sigma`: of the log of an iteration's median transfer on a healthy link; the sums are in sigmas."""

    learn: int = 10
    sigma: float = 0.15
    clip: float = 4.0
    slack: float = 1.0
    threshold: float = 12.0
    least_slowdown: float = 1.5
    least_share: float = 0.02
    window: int = 50


class LinkTrack(msgspec.Struct, frozen=True):
    """What is remembered of a link: its first times, then its usual one; the sum; the excesses since the sum's last zero;
    `level`: the excess estimated while it is slow, 0 while it is healthy.
    """

    first_us: tuple[float, ...] = ()
    usual_us: float | None = None
    sum: float = 0.0
    since: int = -1
    excesses: tuple[float, ...] = ()
    level: float = 0.0

    @property
    def slow(self) -> bool:
        return self.level > 0.0


class LinkChange(msgspec.Struct, frozen=True, kw_only=True):
    """A link turned slow (`slow`) or is healthy again; `ratio`: its time over its usual one, median of `n` iterations;
    `lost_share`: the time that its messages take longer, as a share of the iteration.
    """

    link: Link
    slow: bool
    since: int
    ratio: float
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
    times = {link: max(median(one.us for one in of_link), 1.0) for link, of_link in seen.items()}
    logs = {}
    for link, us in times.items():
        track = after.get(link, LinkTrack())
        if track.usual_us is None:
            first = (*track.first_us, us)
            usual_us = median(first) if len(first) >= options.learn else None
            after[link] = msgspec.structs.replace(track, first_us=() if usual_us else first, usual_us=usual_us, since=iteration)
        else:
            logs[link] = log(us / track.usual_us)
    links = sorted(logs)
    excess = np.array([logs[link] - _common(logs, link) for link in links])
    before = [after[link] for link in links]
    level = np.array([track.level for track in before])
    # What contradicts the present estimate: lateness on a healthy link, punctuality on a slow one.
    z = np.clip(np.where(level > 0, level / 2 - excess, excess) / options.sigma, -options.clip, options.clip)
    sums = CusumSide(np.array([track.sum for track in before]), np.array([track.since for track in before], dtype=np.int64))
    sums = sums.advance(iteration, z - options.slack)
    changes = []
    for number, link in enumerate(links):
        share = len(seen[link]) * (before[number].usual_us or 0.0) / iteration_us
        track = msgspec.structs.replace(before[number], sum=float(sums.total[number]), since=int(sums.zero_at[number]))
        after[link], change = _judged(track, iteration, float(excess[number]), options, link=link, share=share)
        changes += [change] if change else []
    return after, tuple(changes)


def _common(logs: Mapping[Link, float], link: Link) -> float:
    """What the other links show, if there are two or more."""
    others = [value for other, value in logs.items() if other != link]
    return median(others) if len(others) > 1 else 0.0


def _judged(
    track: LinkTrack, iteration: int, excess: float, options: LinkOptions, *, link: Link, share: float
) -> tuple[LinkTrack, LinkChange | None]:
    """What the link's sum says now. `share`: what its messages usually take, as a share of the iteration."""
    if track.sum <= 0:
        return msgspec.structs.replace(track, excesses=()), None
    recent = (*track.excesses[1 - options.window :], excess)
    level = median(recent)
    lost_share = share * (exp(level) - 1)
    if track.slow:
        turned = level < track.level / 2
    else:
        turned = level >= log(options.least_slowdown) and lost_share >= options.least_share
    if track.sum < options.threshold or not turned:
        return msgspec.structs.replace(track, excesses=recent), None
    change = LinkChange(
        link=link, slow=not track.slow, since=track.since + 1, ratio=exp(level), n=len(recent), lost_share=max(lost_share, 0.0)
    )
    level = 0.0 if track.slow else level
    return msgspec.structs.replace(track, sum=0.0, since=iteration, excesses=(), level=level), change
