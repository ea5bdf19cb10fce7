"""An open verdict of a comparison, sized anew: what a rank took longer when it was named may be little beside what it does now.

The Detector revises its own verdicts; of what only the comparison sees, the optimizer's and the rest of a step's time, nobody
else would. A rank that is slow has changed when, over the iterations since its verdict was given, it took as much longer, or
less, than is stated as so few iterations would have to show for it to be named at all. What is no work of a device has become
worse when it costs `WORSE` times what is stated.

Worked example: rank 1 is named for an optimizer at 0.25 of its healthy speed; 16 iterations later it takes 20 times as long as
the others', five times more than is stated: the same verdict, at 0.05, since the iteration in which that began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log

import msgspec
import numpy as np

from unskew.analytics.core.outcome import UnexplainedTime
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.series.levels import one_change
from unskew.analytics.detector.verdicts import Excess, SpeedChange, slow_verdict
from unskew.analytics.loop.watched.side_by_side import CHUNKS, RankWindow, excess_over_others, share_of
from unskew.collector.events import Verdict

WORSE = 1.5


def sized_anew(
    open_: Verdict, found: Verdict, window: RankWindow, options: DetectorOptions, *, least: float, uneven: bool
) -> Verdict | None:
    """The slowness `open_`, which a comparison has just `found` again, as the iterations of `window`, all of them since it was
    given, have it; None where no kind of work differs by `least` (log) or more, or none is slow any more."""
    rank = open_.culprits[0].rank or 0
    kinds = sorted({*open_.speed, *(found.speed.keys() - {*CHUNKS})})  # passes that turn slow are the Detector's to name
    over = {kind: of for kind in kinds if (of := excess_over_others(window, kind, rank)) is not None}
    now = {kind: float(np.median(of)) for kind, of in over.items() if len(of)}
    moved = {kind: abs(level + log(open_.speed.get(kind, 1.0))) for kind, level in now.items()}
    levels = {kind: level for kind, level in now.items() if level >= options.least_level() / 2}
    if max(moved.values(), default=0.0) < least or max(levels.values(), default=0.0) < options.least_level():
        return None
    test = max(moved, key=lambda kind: moved[kind])
    change = SpeedChange(
        since=window.iterations[_changed_at(over[test], -log(open_.speed.get(test, 1.0)))],
        iterations=len(window.iterations),
        test=test,
        cusum=moved[test],
        threshold=least,
        levels=levels,
        excess={kind: Excess(level, level) for kind, level in now.items()},
    )
    verdict = slow_verdict(
        open_.verdict, rank, change, kinds=len(CHUNKS), victims=(), at=window.iterations[-1],
        sigma=options.sigma_floor, episodes=1, options=options,
    )  # fmt: skip
    evidence = {**verdict.evidence, "share_of_time": round(share_of(window, verdict, uneven=uneven), 4)}
    return msgspec.structs.replace(verdict, victims=open_.victims, evidence=evidence)


def costs_more(open_: Verdict, found: Verdict) -> Verdict | None:
    """What is no work of a device, as it is `found` now; None where it does not cost `WORSE` times what was stated."""
    stated, now = (float(one.evidence["share_of_time"]) for one in (open_, found))
    return msgspec.structs.replace(found, verdict=open_.verdict) if now >= WORSE * stated else None


def without_named(
    found: UnexplainedTime, named: Iterable[Verdict], known_since: Mapping[int, int], iteration: int
) -> UnexplainedTime:
    """The time that no cause explains, less what the costliest of the slow ranks costs that comparisons have `named`: a
    predictor that was fitted on one that was slow from its first step on does not know that as a cause before its speed is
    known. Those that are slow at once hold up the same time; what ranks do beside their passes always has a cause."""
    shares = [
        float(one.evidence["share_of_time"]) * (known_since.get(one.culprits[0].rank or 0, iteration + 1) - one.since_iteration)
        for one in named
        if one.speed.keys() & {*CHUNKS}
    ]
    left = max(found.of_measured - max([0.0, *shares]) / (iteration + 1), 0.0)
    of_lost = None if found.of_lost is None else found.of_lost * left / max(found.of_measured, left, 1e-9)
    return msgspec.structs.replace(found, of_measured=left, of_lost=of_lost)


def _changed_at(over: Floats, stated: float) -> int:
    """The position in `over` (log, per iteration) from which on it is not at the `stated` level any more."""
    if len(over) < 2:
        return 0
    at = one_change(over)
    before, after = float(np.median(over[:at])), float(np.median(over[at:]))
    return at if abs(before - stated) < abs(before - after) else 0
