"""Chunk times -> cost model: ``t = n_layers * (a + b * tokens + c * sum_sq) + head * h * tokens`` per kind of work.

Source: ResiHP (section 4.2, eq. 1: linear in tokens and in the sum of squared document lengths), fitted per layer so that the
model survives a repartition. The steps, per kind:

1. the caller gives times at healthy speed (`at_healthy_speed`), so that a device believed slow does not bend the model;
2. terms that the data cannot tell apart are dropped and named in `Fit.unidentified` (all micro-batches of one size: a is not
   separable from b, so the whole is counted per token);
3. relative least squares with non-negative coefficients and Huber weights, so that a spike counts little;
4. a rank that the others contradict is left out (`Fit.left_out`): an unknown slow device must not bend the healthy reference;
5. error bars by split conformal prediction (Lei et al. 2018): of n absolute log errors on micro-batches that were held out, the
   ``ceil(0.9 (n + 1))``-th covers a further one in nine of ten cases, whatever their distribution.

It cannot see a device that was slow from the start and is the only one to execute the head: that looks like a costly head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf, log
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from unskew.analytics.cost import ChunkCost, CostModel, Speeds, speed_of
from unskew.analytics.workload import Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TERMS = ("token_us", "head_us_per_token", "token2_us", "layer_us")  # in this order a term gives way to those before it
LEAST_INDEPENDENT = 1e-3  # less of a term than this, relative to the whole of it, is rounding, not information
HUBER = 1.5  # in robust standard deviations
HELD_OUT = 4  # every fourth
LEAST_SLOW = 1.1  # a rank within 10 % of the others is spread, not contradiction
HUBER_ROUNDS = 15
COVERAGE = 0.9  # of the error bars


class NotIdentifiable(ValueError):  # noqa: N818  # a state of the data, not a mistake
    """Nothing can be fitted: no chunk with a positive time."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One executed chunk: kind F, B or W, its layers, whether with the output head, its work, its own time (us)."""

    rank: int
    kind: str
    n_layers: int
    has_head: bool
    work: Work
    us: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model and what is known of its quality.

    `error_percent`: per kind, mean absolute relative error on held-out micro-batches (the model itself is fitted on all).
    `unidentified`: per kind, the terms that the data could not tell from the others; `left_out`: per kind, ranks that the
    others contradict. Chunks without a positive time measure nothing and are not counted in `n_chunks`.
    """

    model: CostModel
    error_percent: dict[str, float]
    n_chunks: int
    unidentified: dict[str, tuple[str, ...]]
    left_out: dict[str, tuple[int, ...]]


def at_healthy_speed(chunks: Iterable[Chunk], speeds: Speeds) -> list[Chunk]:
    """The chunks as if their devices were not as slow as `speeds` says of the time when they ran."""
    return [msgspec.structs.replace(chunk, us=chunk.us * speed_of(speeds, chunk.rank, chunk.kind)) for chunk in chunks]


def median_error(model: CostModel, chunks: Iterable[Chunk]) -> float:
    """Median absolute relative error of the model on chunks of the kinds that it knows; infinite when there is none."""
    known = [chunk for chunk in chunks if chunk.us > 0 and chunk.kind in model.chunks]
    predicted = [model.chunk_us(chunk.kind, chunk.work, chunk.n_layers, has_head=chunk.has_head) for chunk in known]
    return median([abs(us / chunk.us - 1) for us, chunk in zip(predicted, known, strict=True)] or [inf])


class _Data(msgspec.Struct, frozen=True):
    """One kind's chunks as arrays: `design` (n, terms) us per unit coefficient, `us` (n,) healthy time, `rank` (n,)."""

    design: Floats
    us: Floats
    rank: Ints

    def where(self, mask: NDArray[np.bool_]) -> _Data:
        return _Data(self.design[mask], self.us[mask], self.rank[mask])


def fit(chunks: Sequence[Chunk]) -> Fit:
    """Fit the chunk costs of a healthy device to chunks at its speed (`at_healthy_speed`).

    Raises `NotIdentifiable` when no chunk has a positive time.
    """
    usable = [chunk for chunk in chunks if chunk.us > 0 and chunk.work.tokens > 0]
    if not usable:
        raise NotIdentifiable(f"no predictor from {len(chunks)} chunks: at least one with tokens and a positive time is needed")
    costs: dict[str, ChunkCost] = {}
    error: dict[str, float] = {}
    bars: dict[str, float] = {}
    unidentified: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, tuple[int, ...]] = {}
    for kind in sorted({chunk.kind for chunk in usable}):
        mine = [chunk for chunk in usable if chunk.kind == kind]
        data = _data(mine)
        coefficients, terms, out = _fit_across_ranks(data)
        costs[kind] = ChunkCost(**dict(zip(TERMS, coefficients.tolist(), strict=True)))
        unidentified[kind] = tuple(name for i, name in enumerate(TERMS) if i not in terms)
        left_out[kind] = out
        ratios = _held_out_ratios(mine, data, ~np.isin(data.rank, out), coefficients)
        error[kind] = float(100 * np.mean(np.abs(ratios - 1)))
        if (bar := error_bar(ratios.tolist())) is not None:
            bars[kind] = bar
    return Fit(
        model=CostModel(chunks=costs, bars=bars),
        error_percent=error,
        n_chunks=len(usable),
        unidentified=unidentified,
        left_out=left_out,
    )


def _data(chunks: Sequence[Chunk]) -> _Data:
    rows = [(c.n_layers * c.work.tokens, c.has_head * c.work.tokens, c.n_layers * c.work.sum_sq, c.n_layers) for c in chunks]
    return _Data(np.array(rows, float), np.array([c.us for c in chunks], float), np.array([c.rank for c in chunks]))


def _identifiable(data: _Data) -> list[int]:
    """Indices of the terms that are no mixture of the terms before them (Gram-Schmidt on the relative design)."""
    relative = data.design / data.us[:, None]
    basis: list[Floats] = []
    found = []
    for i in range(len(TERMS)):
        column = relative[:, i]
        rest = column.copy()
        for direction in basis:
            rest = rest - (rest @ direction) * direction
        norm = float(np.linalg.norm(rest))
        if norm > LEAST_INDEPENDENT * float(np.linalg.norm(column)):
            basis.append(rest / norm)
            found.append(i)
    return found


def _fit_robust(data: _Data, terms: list[int]) -> Floats:
    """Huber regression of relative residuals by iterated reweighting; coefficients (terms,), 0 for those not asked for."""
    coefficients = np.zeros(len(TERMS))
    predicted, trust = data.us, np.ones(len(data.us))
    for _ in range(HUBER_ROUNDS):
        weights = np.sqrt(trust) / predicted
        weights /= np.sqrt(np.mean(weights**2))
        before = coefficients.copy()
        # As many rows as terms say the same as all of them: the solver's time would grow with the rows.
        q, r = np.linalg.qr(data.design[:, terms] * weights[:, None])
        coefficients[terms] = nnls(r, q.T @ (data.us * weights))[0]
        predicted = np.maximum(data.design @ coefficients, 1e-9)
        residual = np.abs(data.us / predicted - 1)
        scale = max(1.4826 * float(np.median(residual)), 1e-9)
        trust = np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-12))
        if np.allclose(coefficients, before, rtol=1e-6, atol=0):
            break
    return coefficients


def _factors(data: _Data, coefficients: Floats) -> dict[int, float]:
    """rank -> median of log(measured / predicted)."""
    logs = np.log(data.us / np.maximum(data.design @ coefficients, 1e-9))
    order = np.argsort(data.rank, kind="stable")
    ranks, first = np.unique(data.rank[order], return_index=True)
    return {int(rank): float(np.median(of)) for rank, of in zip(ranks, np.split(logs[order], first[1:]), strict=True)}


def _spread(factors: dict[int, float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(factors.values())))))


def _fit_across_ranks(data: _Data) -> tuple[Floats, list[int], tuple[int, ...]]:
    """Fit, and leave out ranks (at most a quarter, at least one allowed) whose absence halves the disagreement of the rest.

    A rank whose absence would lose a term stays: it is the only witness for it.
    """
    terms = _identifiable(data)
    coefficients = _fit_robust(data, terms)
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
            if _identifiable(rest) == terms:
                trial = _fit_robust(rest, terms)
                trials.append((_spread(_factors(rest, trial)), rank, trial))
        if not trials:
            break
        spread, rank, trial = min(trials, key=lambda t: t[:2])
        if spread > 0.5 * _spread(factors) or _factors(kept, trial)[rank] < np.log(LEAST_SLOW):
            break
        out.append(rank)
        coefficients = trial
    return coefficients, terms, tuple(sorted(out))


def error_bar(ratios: Sequence[float]) -> float | None:
    """Half-width of the error bar from predicted over measured on data not fitted, as a log; None when they are too few."""
    rank = ceil(COVERAGE * (len(ratios) + 1))
    if rank > len(ratios):
        return None
    return sorted(abs(log(max(ratio, 1e-9))) for ratio in ratios)[rank - 1]


def _held_out_ratios(chunks: Sequence[Chunk], data: _Data, kept: NDArray[np.bool_], coefficients: Floats) -> Floats:
    """Predicted over measured; every fourth micro-batch is held out, or every fourth chunk of fewer than four micro-batches."""
    works = sorted({(c.work.tokens, c.work.sum_sq) for c in chunks})
    if len(works) >= HELD_OUT:
        number = {work: i for i, work in enumerate(works)}
        turn = np.array([number[c.work.tokens, c.work.sum_sq] for c in chunks])
    else:
        turn = np.arange(len(chunks))
    held = kept & (turn % HELD_OUT == HELD_OUT - 1)
    learn = kept & ~held
    if held.any():
        learned = data.where(learn)
        coefficients, data = _fit_robust(learned, _identifiable(learned)), data.where(held)
    else:
        data = data.where(kept)
    return np.asarray(data.design @ coefficients / data.us)
