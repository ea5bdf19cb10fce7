"""A predictor fitted again from a finished or running log, by hand: tested on later iterations before it replaces the old one.

The first `share` of the run's complete iterations are fitted (estimated speeds divided out), the rest are predicted by the new
model and by the one in force; the new one replaces it by the rule of retraining.py. The one in force may have been fitted on
some of these, which is to its advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.predictor.fit import Fit, expected_us
from unskew.analytics.predictor.retraining import IterationSample, PredictorBacktest, backtest, fit_seen

SHARE = 2 / 3
LEAST = 12


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """`coverage`: kind of work, "iteration" -> share of later measurements within the new model's 90 % prediction intervals."""

    fitted: Fit
    fitted_on: tuple[int, int]
    tested_on: tuple[int, int]
    new: PredictorBacktest
    old: PredictorBacktest | None
    coverage: dict[str, float]

    @property
    def better(self) -> bool:
        return self.old is None or self.new.beats(self.old)


def retrain(
    seen: Sequence[IterationSample],
    before: CostModel | None,
    share: float = SHARE,
    classes: Mapping[str, tuple[int, ...]] | None = None,
) -> RefitReport:
    """`classes`: device class -> its ranks. Raises `ValueError` when there is too little to fit and to test on."""
    if len(seen) < LEAST:
        raise ValueError(f"{len(seen)} complete iterations are too few to fit and to test a predictor, needed are {LEAST}")
    at = round(share * len(seen))
    learned, later = seen[:at], seen[at:]
    found = fit_seen(learned, classes)
    if found is None or not later:
        raise ValueError("its iterations do not show what chunks should take: none is complete with lengths and times")
    return RefitReport(
        fitted=found,
        fitted_on=(learned[0].committed.iteration, learned[-1].committed.iteration),
        tested_on=(later[0].committed.iteration, later[-1].committed.iteration),
        new=backtest(found.model, later),
        old=backtest(before, later) if before is not None else None,
        coverage=coverage(found.model, later),
    )


def coverage(model: CostModel, later: Sequence[IterationSample]) -> dict[str, float]:
    """How many later measurements lie within the prediction intervals, where there are any."""
    inside: dict[str, list[bool]] = {}

    def count(what: str, predicted_us: float, us: float) -> None:
        if what in model.prediction_intervals and us > 0:
            inside.setdefault(what, []).append(abs(log(max(predicted_us, 1e-9) / us)) <= model.prediction_intervals[what])

    for seen in later:
        committed = seen.committed
        count("iteration", seen.predicted_by(model), committed.measured_us)
        for chunk in seen.chunks:
            if chunk.kind in model.chunks:
                count(chunk.kind, expected_us(model, chunk), chunk.us)
    return {kind: round(sum(hits) / len(hits), 4) for kind, hits in sorted(inside.items())}
