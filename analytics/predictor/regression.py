"""The robust regression behind the predictor: chunk times of one kind of work, on devices of one class, as a sum of terms.

1. terms that the data cannot distinguish are dropped: a later one gives way to those before it, unless one before it would have
   to be negative and the later one fits better (of two lengths a line needs its intercept);
2. relative least squares with non-negative coefficients and Huber weights, so that a spike counts little;
3. a rank that the others contradict is left out: an unknown slow device must not bend the healthy reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_INDEPENDENT = 1e-3  # less of a term than this, relative to the whole of it, is rounding, not information
HUBER = 1.5  # in robust standard deviations
HUBER_ROUNDS = 15
LEAST_SLOW = 1.1  # a rank within 10 % of the others is spread, not contradiction


class RegressionData(msgspec.Struct, frozen=True):
    """Chunks as arrays: `design` (n, terms) us per unit coefficient, `us` (n,) healthy time, `rank` (n,)."""

    design: Floats
    us: Floats
    rank: Ints

    def where(self, mask: NDArray[np.bool_]) -> RegressionData:
        return RegressionData(self.design[mask], self.us[mask], self.rank[mask])


class RegressionSolution(msgspec.Struct, frozen=True):
    """`coefficients` (terms,), 0 for those not in `terms`, the indices of the terms that the data distinguish; ranks
    `left_out`."""

    coefficients: Floats
    terms: list[int]
    left_out: tuple[int, ...]


def solve(data: RegressionData, *, huber: float = HUBER, least_slow: float = LEAST_SLOW) -> RegressionSolution:
    """Fit, and leave out ranks (at most a quarter, at least one allowed) whose absence halves the disagreement of the rest.

    A rank whose absence would lose a term stays: it is the only witness for it.
    """
    terms, coefficients = _best_terms(data, huber)
    out: list[int] = []
    allowed = max(1, len(np.unique(data.rank)) // 4)
    while len(out) < allowed:
        kept = data.where(~np.isin(data.rank, out))
        factors = _factors(kept, coefficients)
        if len(factors) < 3:
            break
        trials = []
        for rank in sorted(factors, key=lambda r: -factors[r])[:3]:
            rest = kept.where(kept.rank != rank)
            if _identifiable(rest, terms) == terms:
                trial = _fit_robust(rest, terms, huber)
                trials.append((_spread(_factors(rest, trial)), rank, trial))
        if not trials:
            break
        spread, rank, trial = min(trials, key=lambda t: t[:2])
        if spread > 0.5 * _spread(factors) or _factors(kept, trial)[rank] < np.log(least_slow):
            break
        out.append(rank)
        coefficients = trial
    return RegressionSolution(coefficients, terms, tuple(sorted(out)))


def ratios_on(held: NDArray[np.bool_], data: RegressionData, solution: RegressionSolution, beside_us: float = 0.0) -> Floats:
    """Predicted over measured of the chunks that are `held` out of a fit to the others (of all, when none is); ranks that were
    left out count in neither. `beside_us`: what each chunk takes beside the times that are fitted."""
    kept = ~np.isin(data.rank, solution.left_out)
    held = kept & held
    coefficients = solution.coefficients
    if held.any():
        learned = data.where(kept & ~held)
        coefficients = _fit_robust(learned, _identifiable(learned, solution.terms))
    tested = data.where(held if held.any() else kept)
    return np.asarray((tested.design @ coefficients + beside_us) / (tested.us + beside_us))


def _best_terms(data: RegressionData, huber: float) -> tuple[list[int], Floats]:
    """The terms that the data distinguish, and their coefficients."""
    terms = _identifiable(data)
    coefficients = _fit_robust(data, terms, huber)
    used, dropped = [i for i in terms if coefficients[i] > 0], [i for i in range(data.design.shape[1]) if i not in terms]
    for term in dropped if len(used) < len(terms) else []:
        others = _identifiable(data, [*used, term])
        if others != terms and term in others:
            trial = _fit_robust(data, others, huber)
            if _misfit(data, trial) < _misfit(data, coefficients):
                terms, coefficients = others, trial
    return terms, coefficients


def _misfit(data: RegressionData, coefficients: Floats) -> float:
    """The mean relative error: what lies beside a line by a median may be a whole length of it."""
    return float(np.mean(np.abs(data.design @ coefficients / data.us - 1)))


def _identifiable(data: RegressionData, first: Sequence[int] = ()) -> list[int]:
    """Indices, ascending, of the terms that are no mixture of the terms before them, of which those in `first` come first
    (Gram-Schmidt on the relative design)."""
    relative = data.design / data.us[:, None]
    basis: list[Floats] = []
    found = []
    for i in (*first, *(i for i in range(relative.shape[1]) if i not in first)):
        column = relative[:, i]
        rest = column.copy()
        for direction in basis:
            rest = rest - (rest @ direction) * direction
        norm = float(np.linalg.norm(rest))
        if norm > LEAST_INDEPENDENT * float(np.linalg.norm(column)):
            basis.append(rest / norm)
            found.append(i)
    return sorted(found)


def _fit_robust(data: RegressionData, terms: list[int], huber: float = HUBER) -> Floats:
    """Huber regression of relative residuals by iterated reweighting; coefficients (terms,), 0 for those not asked for."""
    from scipy.optimize import nnls  # noqa: PLC0415 - 0.2 s that whoever fits nothing saves

    coefficients = np.zeros(data.design.shape[1])
    predicted, trust = data.us, np.ones(len(data.us))
    for _ in range(HUBER_ROUNDS):
        weights = np.sqrt(trust) / predicted
        weights /= np.sqrt(np.mean(weights**2))
        before = coefficients.copy()
        # As many rows as terms hold the same information as all of them: the solver's time would grow with the rows.
        q, r = np.linalg.qr(data.design[:, terms] * weights[:, None])
        coefficients[terms] = nnls(r, q.T @ (data.us * weights))[0]
        predicted = np.maximum(data.design @ coefficients, 1e-9)
        residual = np.abs(data.us / predicted - 1)
        scale = max(1.4826 * float(np.median(residual)), 1e-9)
        trust = np.minimum(1.0, huber * scale / np.maximum(residual, 1e-12))
        if np.allclose(coefficients, before, rtol=1e-6, atol=0):
            break
    return coefficients


def _factors(data: RegressionData, coefficients: Floats) -> dict[int, float]:
    """rank -> median of log(measured / predicted)."""
    logs = np.log(data.us / np.maximum(data.design @ coefficients, 1e-9))
    order = np.argsort(data.rank, kind="stable")
    ranks, first = np.unique(data.rank[order], return_index=True)
    return {int(rank): float(np.median(of)) for rank, of in zip(ranks, np.split(logs[order], first[1:]), strict=True)}


def _spread(factors: dict[int, float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(factors.values())))))
