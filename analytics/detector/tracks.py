"""All that the detector remembers of each (rank, kind of work), as arrays [rank, kind], and what it learns from each iteration:
the noise of each kind, what a role costs, each healthy rank's bias; and what is to be estimated of a rank whose test fired.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.detector.cusum import CusumLimits, CusumSide, CusumSums
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, agreement
from unskew.analytics.detector.residuals import ALL, Flags, Floats, Ints, Residuals, median_of
from unskew.analytics.detector.series.levels import begins_later
from unskew.analytics.detector.verdicts import Excess, SpeedChange

ROLE_KNOWN = 2  # iterations after which what all who play a role show more is theirs and not the role's
OF_ONE = 3.0  # after a single one, which may have been a light one, so many times (log) what it takes later
WILD = 5.0  # one iteration's spread counts as at most so many times what was learned


class ExcessSample(msgspec.Struct, frozen=True):
    """The excess of one iteration over the healthy baseline, [reading, rank, kind]; nan = not judged. What is estimated of the
    rank itself is not subtracted. `unjudged` [rank, kind]: the least excess of ranks in their first iteration on their layers,
    where there are any: it accuses nobody, but it belongs to a slowness that began with it."""

    iteration: int
    excess: Floats
    unjudged: Floats | None = None


class Tracks(msgspec.Struct, frozen=True):
    """`ranks` (ascending) and `kinds` (`ALL` last) name the rows and columns.

    `role` is what its role costs over the prediction (the model's misfit), learned from all who play it while its own past is
    not known; `baseline` is what the healthy device shows by itself, learned slowly and never above a bound; `anchor` is the
    baseline when its own past became known; `level` is ``-log(estimated speed)``; `age` the iterations seen on its present
    layers; `recent` the last iterations, oldest first.
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    sums: CusumSums
    role: Floats
    baseline: Floats
    anchor: Floats
    level: Floats
    age: Ints
    recent: tuple[ExcessSample, ...]

    @staticmethod
    def none() -> Tracks:
        empty = np.zeros((0, 0))
        return Tracks((), (), CusumSums.fresh((0, 0), 0), empty, empty, empty, empty, np.zeros((0, 0), np.int64), ())

    def kinds_of(self, rank: int) -> tuple[str, ...]:
        """Kinds of work (without `ALL`) that the rank has executed on its present layers."""
        row = self.ranks.index(rank)
        return tuple(kind for column, kind in enumerate(self.kinds) if kind != ALL and self.age[row, column] > 0)

    def covering(self, ranks: tuple[int, ...], kinds: tuple[str, ...], now: int) -> Tracks:
        """With rows and columns for these as well."""
        if set(ranks) <= set(self.ranks) and set(kinds) <= set(self.kinds):
            return self
        all_ranks = tuple(sorted({*self.ranks, *ranks}))
        all_kinds = (*sorted({*self.kinds, *kinds} - {ALL}), ALL)
        return self._onto(all_ranks, all_kinds, now)

    def without(self, rank: int) -> Tracks:
        return self._onto(tuple(r for r in self.ranks if r != rank), self.kinds, 0)

    def _onto(self, ranks: tuple[int, ...], kinds: tuple[str, ...], now: int) -> Tracks:
        """Old cells at their new places; new ones as if begun at `now`."""
        rows = [i for i, rank in enumerate(self.ranks) if rank in ranks]
        columns = list(range(len(self.kinds)))
        to = np.ix_([ranks.index(self.ranks[i]) for i in rows], [kinds.index(kind) for kind in self.kinds])
        source = np.ix_(rows, columns)

        def moved(old: NDArray[Any], empty: float) -> NDArray[Any]:
            new = np.full((len(ranks), len(kinds)), empty, dtype=old.dtype)
            new[to] = old[source]
            return new

        sums = self.sums.each(lambda side: CusumSide(moved(side.total, 0), moved(side.zero_at, now)))
        recent = tuple(
            ExcessSample(
                seen.iteration,
                np.stack([moved(reading, np.nan) for reading in seen.excess]),
                None if seen.unjudged is None else moved(seen.unjudged, np.nan),
            )
            for seen in self.recent
        )
        return Tracks(
            ranks,
            kinds,
            sums,
            moved(self.role, 0),
            moved(self.baseline, 0),
            moved(self.anchor, np.nan),
            moved(self.level, 0),
            moved(self.age, 0),
            recent,
        )

    def spread_out(self, load: Residuals) -> Floats:
        """The residuals of a load at the places of these tracks, nan elsewhere."""
        if load.ranks == self.ranks and load.kinds == self.kinds:
            return load.residual
        row_of = {rank: row for row, rank in enumerate(self.ranks)}
        rows, columns = [row_of[rank] for rank in load.ranks], [self.kinds.index(kind) for kind in load.kinds]
        values = np.full((len(self.ranks), len(self.kinds)), np.nan)
        values[np.ix_(rows, columns)] = load.residual
        return values

    def restarted(self, where: Flags, now: int, *, forget: bool = False) -> Tracks:
        """Tests begin anew in these cells; with `forget` (new layers) also what they saw and how long."""
        if not where.any():
            return self
        sums = self.sums.each(lambda side: CusumSide(np.where(where, 0.0, side.total), np.where(where, now, side.zero_at)))
        if not forget:
            return msgspec.structs.replace(self, sums=sums)
        recent = tuple(ExcessSample(seen.iteration, np.where(where, np.nan, seen.excess)) for seen in self.recent)
        return msgspec.structs.replace(self, sums=sums, recent=recent, age=np.where(where, 0, self.age))

    def advanced(self, now: int, excess: Floats, judged: Flags, limits: CusumLimits, window: int) -> Tracks:
        """One iteration further; only what is `judged` counts in the tests."""
        unjudged = None if judged.all() else np.where(judged, np.nan, np.fmin.reduce(excess))
        excess = np.where(judged, excess, np.nan)
        least, most = np.fmin.reduce(excess), np.fmax.reduce(excess)
        return msgspec.structs.replace(
            self,
            sums=self.sums.advance(now, least - self.level, most - self.level, limits),
            recent=(*self.recent[1 - window :], ExcessSample(now, excess, unjudged)),
        )

    def with_levels(self, row: int, levels: Floats, now: int, *, from_anchor: bool = False) -> Tracks:
        """The rank's levels are these from now on, over its bias or, where that crept, over what it was; tests begin anew."""
        where = np.zeros(self.level.shape, dtype=bool)
        where[row] = True
        level = self.level.copy()
        level[row] = levels
        crept = where & from_anchor & ~np.isnan(self.anchor)
        baseline = np.where(crept, self.anchor, self.baseline)
        return msgspec.structs.replace(self.restarted(where, now), level=level, baseline=baseline)

    def rebased(self, before: Floats, after: Floats) -> Tracks:
        """Roles against a new predictor, from one iteration's residuals against the old one and the new one.

        What a rank shows over its role and bias stays, unless the new predictor explains it better than that (all ranks had
        become slower than the old one predicted); an estimated slowness always stays.
        """
        shifted = self.role + after - before
        closer = np.abs(after - shifted - self.baseline) <= np.abs(after - self.role - self.baseline)
        use = ~np.isnan(after) & ~np.isnan(before) & (closer | (self.level != 0))
        return msgspec.structs.replace(self, role=np.where(use, shifted, self.role))

    def grown(self, baseline: Floats, seen: Flags, own_past: int) -> Tracks:
        """One iteration older, with these baselines; the anchor is dropped when the own past becomes known."""
        age = self.age + seen
        anchor = np.where((age == own_past) & seen & np.isnan(self.anchor), baseline, self.anchor)
        return msgspec.structs.replace(self, baseline=baseline, age=age, anchor=anchor)


def learn_noise(noise: Floats, unexplained: Floats, last: Floats | None, options: DetectorOptions) -> Floats:
    """[kind] sigma: a slow mean of the spread between ranks of what is not explained in this iteration (`unexplained` [rank,
    kind], nan = not seen; `last`: in the one before, None = a lone rank is not to be named); nan in `noise` = nothing yet.

    Spread, not size: what all ranks share (a batch more expensive than predicted) is no noise, for nobody is flagged of it,
    and as noise it would hide a slow rank. A minority of slow ranks and a spike do not count either. Spread by the median
    distance from the median (small samples: Croux and Rousseeuw 1992, ``n / (n - 0.8)``). Of two ranks nobody knows what
    they share: the one nearer to its prediction counts; so does of two halves that differ by what would be named. Who works
    alone is compared with its last iteration: a lasting slowness of it would be its noise else, and never be named.
    """
    learned = noise.copy()
    for kind in range(len(noise)):
        values = unexplained[:, kind]
        known = ~np.isnan(values)
        if last is not None and known.sum() == 1:
            values = (values - last[:, kind]) / sqrt(2)
            known = ~np.isnan(values)
        values = _one_half(np.sort(values[known]), options.least_level(young=True))
        n = len(values)
        if n == 0:
            continue
        if n < 3:
            spread = 1.4826 * float(np.abs(values).min())
        else:
            spread = 1.4826 * n / (n - 0.8) * median_of(np.sort(np.abs(values - median_of(values))))
        before = options.sigma_floor if np.isnan(noise[kind]) else float(noise[kind])
        learned[kind] = before + options.noise_gain * (min(spread, WILD * before) - before)
    return learned


def _one_half(ordered: Floats, apart: float) -> Floats:
    """All values, or of an even number, four or more, whose halves are `apart` the half nearer to zero."""
    middle = len(ordered) // 2
    if len(ordered) < 4 or len(ordered) % 2 or ordered[middle] - ordered[middle - 1] < apart:
        return ordered
    return ordered[:middle] if abs(ordered[middle - 1]) <= abs(ordered[middle]) else ordered[middle:]


def learn_roles(tracks: Tracks, over: Floats, young: Flags, company: PeerGroups, apart: float) -> Floats:
    """[rank, kind]: what a role costs over the prediction and the biases of those who play it (`over`, nan = not seen), as a
    running mean over the time in which their own past on these layers is not known.

    The median counts; of two ranks, and of halves that differ by `apart`, the one nearer to its prediction: half a role that is
    slow from the beginning is no cost of the role, nor is what is estimated of ranks that were slow before. Who plays a role
    alone learns nothing of it. A role costs from its first iteration on what it costs: where all who play it rise later by
    `apart`, they became slow.
    """
    if not young.any():
        return tracks.role
    unexplained = over - tracks.level
    agreed = agreement(np.where(np.abs(unexplained) < np.abs(over), unexplained, over), company.peer_groups, apart)
    risen = (tracks.age > 0) & (agreed - tracks.role >= np.where(tracks.age < ROLE_KNOWN, OF_ONE * apart, apart))
    learns = young & ~np.isnan(agreed) & ~np.isnan(over) & ~risen
    return np.where(learns, tracks.role + (agreed - tracks.role) / (tracks.age + 1.0), tracks.role)


def learn_baselines(tracks: Tracks, own: Floats, quiet: Flags, options: DetectorOptions) -> Floats:
    """[rank, kind]: a rank's baseline follows what it shows over it (`own`, nan = not seen) where `quiet`: it does not stand
    flagged and its test has no suspicion. At first a running mean, later with `baseline_gain`; what would be named in a young
    rank is never a bias, and a known bias moves by less than what is named. Where the ranks have a shift in common, only what
    one shows over that is its own."""
    gain = np.maximum(options.baseline_gain, 1.0 / (tracks.age + 1.0))
    bound = options.least_level(young=True)
    unknown = np.isnan(tracks.anchor)
    anchor, room = np.where(unknown, 0.0, tracks.anchor), np.where(unknown, bound, options.least_level())
    common = _middle(own)
    over = own - np.where(np.abs(common) > bound / 2, common, 0.0)
    learns = quiet & (np.abs(over) <= bound)
    moved = np.minimum(np.maximum(tracks.baseline + gain * np.where(learns, over, 0.0), anchor - room), anchor + room)
    return np.where(learns, moved, tracks.baseline)


def _middle(own: Floats) -> Floats:
    """[kind]: what more than half of the ranks, three or more, show at least: of the two middle values the one nearer to 0."""
    middle = np.zeros(own.shape[1])
    for kind, values in enumerate(own.T):
        known = np.sort(values[~np.isnan(values)])
        if len(known) >= 3:
            middle[kind] = min(known[(len(known) - 1) // 2], known[len(known) // 2], key=abs)
    return middle


def decide(tracks: Tracks, row: int, limits: CusumLimits, *, flagged: bool, options: DetectorOptions) -> SpeedChange | None:
    """What the tests of the rank at `row` lead to; None when nothing has changed or too few iterations speak.

    The level of a kind is the least of its typical excesses when it rose, the most when it fell. A kind is slow from
    `least_slowdown` on; once one is, or all together are, the other kinds are from half of it on. Where the evidence began with
    less than is named and later became what is, only the later part counts, once it would have fired by itself.
    """
    thresholds = limits.threshold
    up = tracks.sums.up.total[row] / thresholds
    down = tracks.sums.down.total[row] / thresholds if flagged else np.zeros_like(up)
    rising = bool(up.max() >= down.max())
    column = int(np.argmax(up if rising else down))
    side = tracks.sums.up if rising else tracks.sums.down
    since = int(side.zero_at[row, column])
    rows = [seen for seen in tracks.recent if seen.iteration > since and not np.isnan(seen.excess[0, row, column])]
    if max(up.max(), down.max()) <= 1 or len(rows) < options.least_iterations:
        return None
    executed = [at for at in range(len(tracks.kinds)) if not all(np.isnan(seen.excess[0, row, at]) for seen in rows)]
    least = options.least_level(young=bool((tracks.age[row, executed] < options.own_past).any()))
    over = np.array([np.nanmin(seen.excess[:, row, column]) for seen in rows])
    later = begins_later(over, least) if rising else 0
    if later:
        since, rows = rows[later - 1].iteration, rows[later:]
        gain = np.minimum(over[later:] - tracks.level[row, column] - limits.slack[row, column], limits.cap[column])
        if gain.sum() <= thresholds[column]:
            return None
    excess = {}
    for at in executed:
        values = np.array([seen.excess[:, row, at] for seen in rows])
        values = values[~np.isnan(values[:, 0])]
        if len(values):
            excess[tracks.kinds[at]] = _typical(values)
    creep = _creep(tracks, row, column, options) if rising else {}
    levels = {kind: (found.least if rising else found.most) + creep.get(kind, 0.0) for kind, found in excess.items()}
    slow = {kind: level for kind, level in levels.items() if level >= least / 2} if max(levels.values()) >= least else {}
    if not slow.keys() - {ALL}:
        slow = {}
    return SpeedChange(
        since=since
        if slow and _unjudged(tracks, row, column, since) >= levels[tracks.kinds[column]] / 2
        else rows[0].iteration,
        iterations=len(rows),
        test=tracks.kinds[column],
        cusum=float(side.total[row, column]),
        threshold=float(thresholds[column]),
        levels=slow,
        excess=excess,
        creep=creep,
    )


def _unjudged(tracks: Tracks, row: int, column: int, iteration: int) -> float:
    """The excess in an iteration in which the rank was not judged, for it was the first on its layers; nan if it was."""
    seen = next((seen for seen in tracks.recent if seen.iteration == iteration), None)
    return np.nan if seen is None or seen.unjudged is None else float(seen.unjudged[row, column])


def _creep(tracks: Tracks, row: int, column: int, options: DetectorOptions) -> dict[str, float]:
    """kind -> by how much the rank's bias has risen since its own past became known, beyond the others': what
    rises on all is the whole job's; empty when that is little."""
    risen = tracks.baseline - tracks.anchor
    others = np.delete(risen, row, axis=0)
    known = np.where(np.isnan(others).all(axis=0), 0.0, others)
    mine = risen[row] - np.maximum(np.nanmedian(known, axis=0), 0.0) if len(others) else risen[row]
    if tracks.level[row].any() or not mine[column] >= options.least_level() / 2:
        return {}
    return {kind: max(float(mine[at]), 0.0) for at, kind in enumerate(tracks.kinds) if not np.isnan(mine[at])}


def _typical(values: Floats) -> Excess:
    """Medians over iterations of [iteration, reading]: robust against just under half of them."""
    middles = [float(np.median(known)) if len(known := column[~np.isnan(column)]) else None for column in values.T]
    assert middles[0] is not None
    return Excess(middles[0], middles[1], middles[2])
