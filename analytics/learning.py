"""What the fail-slow detector learns on its way: the noise of each kind of work, and each healthy rank's habit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from unskew.analytics.sequential import Track
from unskew.analytics.thresholds import DetectorOptions

Key = tuple[int, str]
"""(rank, kind of work)"""


def learn_noise(
    noise: Mapping[str, float], tracks: Mapping[Key, Track], now: int, options: DetectorOptions
) -> dict[str, float]:
    """kind -> sigma: a slow mean of 1.4826 * median over ranks of the unexplained residual in iteration `now`.

    The lower median, and clipped: a minority of slow ranks and a spike do not count as noise.
    """
    sizes: dict[str, list[float]] = {}
    for (_, kind), track in tracks.items():
        if track.recent and track.recent[-1].iteration == now:
            sizes.setdefault(kind, []).append(abs(track.recent[-1].excess.own - track.level))
    learned = dict(noise)
    for kind, values in sorted(sizes.items()):
        before = learned.get(kind, options.sigma_floor)
        size = min(1.4826 * sorted(values)[(len(values) - 1) // 2], options.winsor * before)
        learned[kind] = before + options.noise_gain * (size - before)
    return learned


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
