"""From the sequential tests of one rank to what should now be believed of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unskew.analytics.residuals import ALL, Excess
from unskew.analytics.sequential import Track, typical
from unskew.analytics.thresholds import DetectorOptions


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A test has fired. `levels` (kind -> -log speed, `ALL` included) is empty when the rank is as healthy as the rest.

    `test`, `cusum`: the kind whose sum is highest and that sum; `excess`: typical excess per kind over `iterations` iterations
    since `since`.
    """

    since: int
    iterations: int
    test: str
    cusum: float
    levels: dict[str, float]
    excess: dict[str, Excess]


def decide(tracks: Mapping[str, Track], *, accused: bool, options: DetectorOptions) -> Change | None:
    """What one rank's tracks (kind -> track) say; None when nothing has changed or too few iterations speak.

    The level of a kind is the least of its typical excesses when it rose, the most when it fell. A kind is slow from
    `least_slowdown` on; once one is, or all together are, the other kinds are from half of it on.
    """
    fired = [(track.up.sum, kind, track.up.zero_at, True) for kind, track in tracks.items()]
    if accused:
        fired += [(track.down.sum, kind, track.down.zero_at, False) for kind, track in tracks.items()]
    cusum, test, zero_at, rising = max(fired, default=(0.0, ALL, 0, True))
    rows = tracks[test].since(zero_at + 1) if cusum > options.threshold else ()
    if len(rows) < options.least_iterations:
        return None
    since = rows[0].iteration
    excess = {kind: typical(seen) for kind, track in tracks.items() if (seen := track.since(since))}
    levels = {kind: found.least if rising else found.most for kind, found in excess.items()}
    if max(levels.values()) < options.least_level:
        slow = {}
    else:
        slow = {kind: level for kind, level in levels.items() if level >= options.least_level / 2}
    if not slow.keys() - {ALL}:
        slow = {}
    return Change(since=since, iterations=len(rows), test=test, cusum=cusum, levels=slow, excess=excess)
