"""From the sequential tests of one rank to what is now to be estimated of it."""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.detector.cusum import CusumLimits
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import ALL, Floats
from unskew.analytics.detector.series.levels import begins_later
from unskew.analytics.detector.tracks import Tracks


class Excess(msgspec.Struct, frozen=True, gc=False):
    """Median excess over some iterations against each reference that exists; None = there is no such reference."""

    own: float
    data_parallel_peers: float | None = None
    pipeline_peers: float | None = None

    @property
    def least(self) -> float:
        """What remains of a slowness after every excuse."""
        return min(self._values())

    @property
    def most(self) -> float:
        """What remains of a recovery after every excuse (residuals fall when a device recovers)."""
        return max(self._values())

    def _values(self) -> list[float]:
        return [value for value in (self.own, self.data_parallel_peers, self.pipeline_peers) if value is not None]


class SpeedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A test has fired. `levels` (kind -> -log speed, `ALL` included) is empty when the rank is as healthy as the rest.

    `test`, `cusum`, `threshold`: the kind whose sum is highest over its threshold; `excess`: typical excess per kind over
    `iterations` iterations since `since`. `creep`: by how much the biases (log, per kind) had already risen when the test
    fired, where that is as much as half of what is named; `levels` includes it.
    """

    since: int
    iterations: int
    test: str
    cusum: float
    threshold: float
    levels: dict[str, float]
    excess: dict[str, Excess]
    creep: dict[str, float] = {}


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
