"""The predictor's regression as scikit-learn's tools use it; their own are asked where they are installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn import base  # type: ignore[import-untyped]  # it ships no types
from sklearn import model_selection as selection
from sklearn.utils import estimator_checks  # type: ignore[import-untyped]

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.workload import Work
from unskew.analytics.predictor.estimator import FEATURES, ChunkTimeRegressor, features_of
from unskew.analytics.predictor.fit import fit


def chunks(n: int = 240, *, slow: int | None = None) -> list[Chunk]:
    """Chunks of two layers in the order of time on four ranks, the last of which has the head; `slow` takes twice as long."""
    random = np.random.default_rng(2)
    found = []
    for number in range(n):
        rank, tokens = number % 4, int(random.integers(40, 200))
        work = Work(tokens, tokens * int(random.integers(20, 60)))
        us = 2 * (30.0 + 1.5 * work.tokens + 0.01 * work.sum_sq) + (rank == 3) * 2.0 * work.tokens
        us *= (1 + (rank == slow)) * float(np.exp(random.normal(0, 0.01)))
        found.append(Chunk(rank, "F", 2, rank == 3, work, us))
    return found


def test_it_is_the_fit_of_the_predictor() -> None:
    """`fit` and the estimator make one model of the same chunks, a rank that the others contradict left out."""
    rows, times = features_of(chunks(slow=1))
    regressor, cost = ChunkTimeRegressor().fit(rows, times), fit(chunks(slow=1)).model.chunks["F"]
    assert regressor.coef_.tolist() == [cost.token_us, cost.head_us_per_token, cost.token2_us, cost.layer_us]
    assert regressor.coef_ == pytest.approx([1.5, 2.0, 0.01, 30.0], rel=0.1)
    assert regressor.left_out_ == (1,)
    assert ChunkTimeRegressor(least_slow=3.0).fit(rows, times).left_out_ == ()


def test_later_iterations_are_predicted_from_earlier_ones() -> None:
    rows, times = features_of(chunks())
    regressor = ChunkTimeRegressor().fit(rows[:160], times[:160])
    assert np.median(abs(regressor.predict(rows[160:]) / times[160:] - 1)) < 0.02
    assert 0.99 < regressor.score(rows[160:], times[160:]) < 1.0
    assert regressor.score(rows[160:], 3 * times[160:]) < 0.0


def test_its_parameters_are_got_and_set_by_name() -> None:
    regressor = ChunkTimeRegressor(huber=2.0)
    assert regressor.get_params() == {"huber": 2.0, "least_slow": 1.1}
    assert ChunkTimeRegressor(**regressor.set_params(least_slow=1.3).get_params()).least_slow == 1.3
    with pytest.raises(ValueError, match="alpha is no parameter of ChunkTimeRegressor, allowed: huber, least_slow"):
        regressor.set_params(alpha=1.0)


def test_what_cannot_be_fitted_or_predicted_is_said_in_a_sentence() -> None:
    rows, times = features_of(chunks(8))
    with pytest.raises(ValueError, match="not fitted yet"):
        ChunkTimeRegressor().predict(rows)
    with pytest.raises(ValueError, match=r"5 columns \(n_layers, has_head, tokens, sum_sq, rank\)"):
        ChunkTimeRegressor().fit(rows[:, :3], times)
    one_of_all = np.where(np.arange(8) == 3, 1e-160, times)
    for wrong in (times[:3], 0 * times, np.inf * times, np.nan * times, 1e300 * times, 1e-200 * times, one_of_all):
        with pytest.raises(ValueError, match="one positive and finite time for each of the 8 rows"):
            ChunkTimeRegressor().fit(rows, wrong)
    for number in (np.inf, np.nan):
        with pytest.raises(ValueError, match="NaN, inf"):
            ChunkTimeRegressor().fit(rows + number, times)
    with pytest.raises(ValueError, match=r"allowed: 0, 1e-40 to 1e\+40"):
        ChunkTimeRegressor().fit(1e200 * rows, times)
    ChunkTimeRegressor().fit(1e12 * rows, 1e-12 * times)
    with pytest.raises(ValueError, match="there must be one"):
        ChunkTimeRegressor().fit(np.zeros((0, len(FEATURES))), [])


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
        estimator_checks.check_valid_tag_types,
        estimator_checks.check_estimators_unfitted,
    ],
)
def test_scikit_learn_finds_its_conventions(check: Callable[[str, object], None]) -> None:
    """Those of its own checks that make up no data: theirs has other columns."""
    check("ChunkTimeRegressor", ChunkTimeRegressor())


def test_scikit_learn_clones_it_and_validates_it_over_time() -> None:
    rows, times = features_of(chunks())
    split = selection.TimeSeriesSplit(n_splits=4)
    scores = selection.cross_val_score(ChunkTimeRegressor(), rows, times, cv=split)
    assert len(scores) == 4
    assert min(scores) > 0.99
    errors = selection.cross_val_score(
        ChunkTimeRegressor(), rows, times, cv=split, scoring="neg_mean_absolute_percentage_error"
    )
    assert min(errors) > -0.02
    assert base.clone(ChunkTimeRegressor(huber=2.0)).huber == 2.0
    search = selection.GridSearchCV(ChunkTimeRegressor(), {"huber": [1.0, 1.5]}, cv=split).fit(rows, times)
    assert search.best_params_["huber"] in (1.0, 1.5)
    assert base.is_regressor(ChunkTimeRegressor())
