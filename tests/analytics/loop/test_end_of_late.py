"""By how much iterations end later of late: their level, and what comes again now and then, which is no level that moves."""

from __future__ import annotations

import pytest

from unskew.analytics.core.cost import CostModel
from unskew.analytics.detector.options import EMULATED
from unskew.analytics.loop.monitor import AGAIN_OVER, AROUND, Monitor
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.predictor.retraining import Retraining

FITTED = Fit(model=CostModel(chunks={}), error_percent={}, n_chunks=0, unidentified={}, left_out={})


def longer_us(*series: float) -> float:
    """After a series of what iterations took longer."""
    longer = tuple(enumerate(series))[-(AGAIN_OVER + AROUND) :]
    return Monitor(options=EMULATED, retraining=Retraining(fitted=FITTED), longer=longer).longer_us


@pytest.mark.parametrize(("before", "after"), [(0.0, 100.0), (100.0, 0.0)])
def test_a_level_that_moves_does_not_come_again(before: float, after: float) -> None:
    found = [longer_us(*[before] * 20, *[after] * k) for k in range(25)]
    assert min(found) >= 0.0
    assert max(found) <= 100.0
    assert found[5:] == [after] * 20


@pytest.mark.parametrize("level", [0.0, 100.0])
@pytest.mark.parametrize(("every", "mean"), [(5, 6.0), (10, 3.0), (25, 0.0)])
def test_what_comes_again_is_in_the_mean_where_it_came_twice(level: float, every: int, mean: float) -> None:
    series = [level + (30.0 if at % every == 0 else 0.0) for at in range(50)]
    assert all(longer_us(*series[:n]) == pytest.approx(level + mean) for n in range(25, 50))
