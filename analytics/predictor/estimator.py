"""The predictor's regression by scikit-learn's conventions: fit, predict, score, get_params, set_params; clonable, and usable
in cross_val_score with TimeSeriesSplit. scikit-learn itself is not needed.

A row of `X` is a chunk of one kind of work at one place, in the order of time: `FEATURES`; `y` its time in us at healthy speed.

>>> import numpy as np
>>> X = np.array([[4, 0, tokens, tokens**2, rank] for tokens in (64, 96, 128) for rank in (0, 1, 2)], float)
>>> y = 4 * (50.0 + 2.0 * X[:, 2])
>>> regressor = ChunkTimeRegressor().fit(X, y)
>>> np.round(regressor.predict([[8, 0, 100, 10_000, 1]])).tolist(), round(regressor.score(X, y), 6)
([2000.0], 1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.predictor.regression import HUBER, LEAST_SLOW, Floats, RegressionData, solve

FEATURES = ("n_layers", "has_head", "tokens", "sum_sq", "rank")
"""`rank` is not predicted from: it says whose chunk it was, so that a rank that the others contradict can be left out."""
MOST = 1e40
"""Products of larger numbers have no square: the solver that is given infinity for it ends the process."""


def features_of(chunks: Sequence[Chunk]) -> tuple[Floats, Floats]:
    """`X` and `y` of chunks."""
    rows = [(c.n_layers, c.has_head, c.work.tokens, c.work.sum_sq, c.rank) for c in chunks]
    return np.array(rows, float).reshape(-1, len(FEATURES)), np.array([c.us for c in chunks], float)


def data_of(X: Floats, y: Floats) -> RegressionData:  # noqa: N803  # scikit-learn's names
    """As the regression takes it: per row what each coefficient of the model is multiplied with (eq. 1, per layer)."""
    n_layers, has_head, tokens, sum_sq, rank = X.T
    design = np.stack([n_layers * tokens, has_head * tokens, n_layers * sum_sq, n_layers], axis=1)
    return RegressionData(design, y, rank.astype(np.int64))


class ChunkTimeRegressor:
    """`huber`: residuals of so many robust standard deviations count in full; `least_slow`: a rank that is so much slower than
    the rest may be left out. After `fit`: `coef_` (us per layer and token, per token of the head, per layer and squared token,
    per layer), `left_out_` ranks, `terms_` that the data distinguish, `n_features_in_`.
    """

    _estimator_type = "regressor"

    def __init__(self, huber: float = HUBER, least_slow: float = LEAST_SLOW) -> None:
        self.huber, self.least_slow = huber, least_slow

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn's signature
        """What the constructor was given."""
        return {"huber": self.huber, "least_slow": self.least_slow}

    def set_params(self, **params: Any) -> ChunkTimeRegressor:
        """Raises `ValueError` for a parameter that there is not."""
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(f"{name} is no parameter of {type(self).__name__}, allowed: {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def fit(self, X: ArrayLike, y: ArrayLike) -> ChunkTimeRegressor:  # noqa: N803
        """Raises `ValueError` where there is nothing to fit: no row, or a time that is not positive and finite."""
        rows, us = _checked(X), np.asarray(y, float)
        if us.shape != (len(rows),) or not len(us) or not (us > 0).all() or not _countable(us):
            raise ValueError(
                f"y must have one positive and finite time for each of the {len(rows)} rows of X, and there must be one, "
                f"allowed: {1 / MOST:g} to {MOST:g}"
            )
        solution = solve(data_of(rows, us), huber=self.huber, least_slow=self.least_slow)
        self.coef_, self.terms_, self.left_out_ = solution.coefficients, tuple(solution.terms), solution.left_out
        self.n_features_in_ = len(FEATURES)
        return self

    def predict(self, X: ArrayLike) -> Floats:  # noqa: N803
        """Microseconds on a healthy device. Raises `ValueError` before `fit`: scikit-learn's `NotFittedError` where that is."""
        if not self.__sklearn_is_fitted__():
            raise _not_fitted()("it is not fitted yet: call fit first")
        rows = _checked(X)
        return np.asarray(data_of(rows, np.ones(len(rows))).design @ self.coef_)

    def score(self, X: ArrayLike, y: ArrayLike) -> float:  # noqa: N803
        """The coefficient of determination, as of every regressor there: 1.0 at best."""
        us = np.asarray(y, float)
        apart = float(((us - us.mean()) ** 2).sum())
        off = float(((us - self.predict(X)) ** 2).sum())
        return 1.0 - off / apart if apart else float(off == 0.0)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "coef_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags, Tags, TargetTags  # noqa: PLC0415 - asked by scikit-learn alone

        return Tags(estimator_type="regressor", target_tags=TargetTags(required=True), regressor_tags=RegressorTags())


def _not_fitted() -> type[ValueError]:
    """What scikit-learn's tools catch; who uses them has it."""
    try:
        from sklearn.exceptions import NotFittedError  # noqa: PLC0415 - no dependency
    except ImportError:
        return ValueError
    return cast("type[ValueError]", NotFittedError)


def _checked(X: ArrayLike) -> Floats:  # noqa: N803
    rows = np.asarray(X, float)
    if rows.ndim != 2 or rows.shape[1] != len(FEATURES):
        raise ValueError(f"X must have {len(FEATURES)} columns ({', '.join(FEATURES)}), its shape is {rows.shape}")
    if not _countable(rows):
        raise ValueError(f"X must have finite numbers, and has NaN, inf or others, allowed: 0, {1 / MOST:g} to {MOST:g}")
    return rows


def _countable(numbers: Floats) -> bool:
    sizes = np.abs(numbers[numbers != 0])
    return bool(((sizes >= 1 / MOST) & (sizes <= MOST)).all())
