"""What the fail-slow detector learns on its way: the noise of each kind of work, and each healthy rank's habit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from unskew.analytics.sequential import Track
from unskew.analytics.thresholds import DetectorOptions

Key = tuple[int, str]
"""(rank, kind of work)"""


def learn_noise(
    noise: Mapping[str, float], tracks: Mapping[Key, Track], now: int, options: DetectorOptions
) -> dict[str, float]:
    """kind -> sigma: a slow mean of the spread between ranks of what is not explained in iteration `now`, clipped.

    Spread, not size: what all ranks share (a batch dearer than predicted) is no noise, for nobody is accused of it, and as
    noise it would hide a slow rank. A minority of slow ranks and a spike do not count either.
    """
    unexplained: dict[str, list[float]] = {}
    for (_, kind), track in tracks.items():
        if track.recent and track.recent[-1].iteration == now:
            unexplained.setdefault(kind, []).append(track.recent[-1].excess.own - track.level)
    learned = dict(noise)
    for kind, values in sorted(unexplained.items()):
        before = learned.get(kind, options.sigma_floor)
        size = min(_spread(values), options.winsor * before)
        learned[kind] = before + options.noise_gain * (size - before)
    return learned


def _spread(values: Sequence[float]) -> float:
    """Standard deviation by the median distance from the median (small samples: Croux and Rousseeuw 1992, ``n / (n - 0.8)``).

    Of two ranks nobody knows what they share: the one nearer to its prediction counts.
    """
    n = len(values)
    if n < 3:
        return 1.4826 * min(map(abs, values))
    middle = median(values)
    return 1.4826 * n / (n - 0.8) * median(abs(value - middle) for value in values)


def learn_baselines(
    tracks: Mapping[Key, Track], accused: Collection[int], now: int, options: DetectorOptions
) -> dict[Key, Track]:
    """A rank's baseline follows its residual slowly unless it stands accused; what is beyond the bound is never a habit."""
    learned = dict(tracks)
    bound = options.baseline_bound
    for key, track in tracks.items():
        if key[0] in accused or not track.recent or track.recent[-1].iteration != now:
            continue
        own = track.recent[-1].excess.own
        if abs(own) <= bound:
            baseline = min(max(track.baseline + options.baseline_gain * own, -bound), bound)
            learned[key] = msgspec.structs.replace(track, baseline=baseline)
    return learned
