"""What the fail-slow detector learns: the noise of each kind of work, and each healthy rank's bias."""

from __future__ import annotations

import numpy as np

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, agreement
from unskew.analytics.detector.residuals import Flags, Floats
from unskew.analytics.detector.tracks import Tracks

WILD = 5.0  # one iteration's spread counts as at most so many times what was learned


def learn_noise(noise: Floats, unexplained: Floats, options: DetectorOptions) -> Floats:
    """[kind] sigma: a slow mean of the spread between ranks of what is not explained in this iteration (`unexplained` [rank,
    kind], nan = not seen); nan in `noise` = nothing learned yet.

    Spread, not size: what all ranks share (a batch more expensive than predicted) is no noise, for nobody is flagged of it,
    and as noise it would hide a slow rank. A minority of slow ranks and a spike do not count either. Spread by the median
    distance from the median (small samples: Croux and Rousseeuw 1992, ``n / (n - 0.8)``). Of two ranks nobody knows what
    they share: the one nearer to its prediction counts.
    """
    learned = noise.copy()
    for kind in range(len(noise)):
        values = unexplained[:, kind]
        values = values[~np.isnan(values)]
        n = len(values)
        if n == 0:
            continue
        if n < 3:
            spread = 1.4826 * float(np.abs(values).min())
        else:
            spread = 1.4826 * n / (n - 0.8) * float(np.median(np.abs(values - np.median(values))))
        before = options.sigma_floor if np.isnan(noise[kind]) else float(noise[kind])
        learned[kind] = before + options.noise_gain * (min(spread, WILD * before) - before)
    return learned


def learn_roles(tracks: Tracks, over: Floats, young: Flags, company: PeerGroups) -> Floats:
    """[rank, kind]: what a role costs over the prediction and the biases of those who play it (`over`, nan = not seen), as a
    running mean over the time in which their own past on these layers is not known.

    Of three or more the median counts, of two the one nearer to its prediction; who plays a role alone learns nothing of it.
    """
    agreed = agreement(over, company.peer_groups)
    learns = young & ~np.isnan(agreed) & ~np.isnan(over)
    return np.where(learns, tracks.role + (np.nan_to_num(agreed) - tracks.role) / (tracks.age + 1.0), tracks.role)


def learn_baselines(tracks: Tracks, own: Floats, quiet: Flags, options: DetectorOptions) -> Floats:
    """[rank, kind]: a rank's baseline follows what it shows over it (`own`, nan = not seen) where `quiet`: it does not stand
    flagged and its test has no suspicion. At first a running mean, later with `baseline_gain`; what would be named in a young
    rank is never a bias, and a known bias moves by less than what is named. Where the ranks have a shift in common, only what
    one shows over that is its own."""
    gain = np.maximum(options.baseline_gain, 1.0 / (tracks.age + 1.0))
    bound = options.least_level(young=True)
    anchor, room = np.nan_to_num(tracks.anchor), np.where(np.isnan(tracks.anchor), bound, options.least_level())
    common = _middle(own)
    over = own - np.where(np.abs(common) > bound / 2, common, 0.0)
    learns = quiet & (np.abs(over) <= bound)
    moved = np.clip(tracks.baseline + gain * np.where(learns, over, 0.0), anchor - room, anchor + room)
    return np.where(learns, moved, tracks.baseline)


def _middle(own: Floats) -> Floats:
    """[kind]: what more than half of the ranks, three or more, show at least: of the two middle values the one nearer to 0."""
    middle = np.zeros(own.shape[1])
    for kind, values in enumerate(own.T):
        known = np.sort(values[~np.isnan(values)])
        if len(known) >= 3:
            middle[kind] = min(known[(len(known) - 1) // 2], known[len(known) // 2], key=abs)
    return middle
