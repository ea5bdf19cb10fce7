"""How far the work of a rank is from what it should take on a healthy device.

A residual is ``log(measured / expected)``, per rank and kind the median over the iteration's pieces of work: 0 = as expected,
log 1.8 = 1.8 times as long. A rank is any unit that is judged: where no chunks are known, a worker or a process.

Everything is arrays [rank, kind]; nan = not seen in this iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import CostModel, Costs
from unskew.analytics.core.iteration import Chunk
from unskew.collector.events import RankRatio

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ALL = "all"  # every kind of work together, weighted by predicted time


class Residuals(msgspec.Struct, frozen=True):
    """One iteration of all ranks seen: `residual` [rank, kind] (the last kind is `ALL`), and the sums behind it (us) [rank]."""

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    residual: Floats
    measured_us: Floats
    predicted_us: Floats


class UnitTimes(msgspec.Struct, frozen=True):
    """What pieces of work took in one iteration and what each takes on a healthy unit (nan = not known): arrays (n,); `kind` is
    an index into `kinds`."""

    kinds: tuple[str, ...]
    rank: Ints
    kind: Ints
    us: Floats
    expected_us: Floats


class ChunkColumns(msgspec.Struct, frozen=True):
    """Chunks as columns, each (n,): `kind` is an index into `kinds`; `tp` how many ranks executed it together; `again`:
    with the forward once more."""

    kinds: tuple[str, ...]
    rank: Ints
    kind: Ints
    n_layers: Floats
    head: Floats
    tokens: Floats
    sum_sq: Floats
    tp: Ints
    us: Floats
    again: Floats


def columns(chunks: Sequence[Chunk]) -> ChunkColumns:
    kinds = tuple(sorted({chunk.kind for chunk in chunks}))
    number = {kind: i for i, kind in enumerate(kinds)}
    works = [chunk.work for chunk in chunks]
    return ChunkColumns(
        kinds,
        np.array([chunk.rank for chunk in chunks], dtype=np.int64),
        np.array([number[chunk.kind] for chunk in chunks], dtype=np.int64),
        np.array([chunk.n_layers for chunk in chunks], dtype=np.float64),
        np.array([chunk.has_head for chunk in chunks], dtype=np.float64),
        np.array([work.tokens for work in works], dtype=np.float64),
        np.array([work.sum_sq for work in works], dtype=np.float64),
        np.array([chunk.tp for chunk in chunks], dtype=np.int64),
        np.array([chunk.us for chunk in chunks], dtype=np.float64),
        np.array([chunk.again for chunk in chunks], dtype=np.float64),
    )


def predicted_us(chunks: ChunkColumns, cost: CostModel) -> Floats:
    """(n,): what each chunk takes on a healthy device; nan for a kind that the model does not know."""
    if not len(chunks.rank):
        return np.zeros(0)

    def terms_of(costs: Costs) -> list[tuple[float, ...]]:
        unknown = (np.nan,) * 5
        found = (costs.get(kind) for kind in (*chunks.kinds, "F"))
        return [(c.layer_us, c.token_us, c.token2_us, c.head_us_per_token, c.own_us) if c else unknown for c in found]

    class_of = np.zeros(int(chunks.rank.max()) + 1, dtype=np.int64)
    for number, ranks in enumerate(cost.classes.values(), start=1):
        class_of[[rank for rank in ranks if rank < len(class_of)]] = number
    degrees, degree = np.unique(chunks.tp, return_inverse=True) if np.ptp(chunks.tp) else (chunks.tp[:1], np.int64(0))
    table = [[terms_of(cost.costs_at((name, tp))) for tp in degrees.tolist()] for name in ("", *cost.classes)]
    of = np.array(table)

    def us(kind: Ints | int) -> Floats:
        terms = of[class_of[chunks.rank], degree, kind]
        per_layer = terms[:, 0] + terms[:, 1] * chunks.tokens + terms[:, 2] * chunks.sum_sq
        return np.asarray(terms[:, 4] + chunks.n_layers * per_layer + chunks.head * terms[:, 3] * chunks.tokens)

    found = us(chunks.kind)
    return found + chunks.again * us(-1) if chunks.again.any() else found


def chunk_times(chunks: ChunkColumns, cost: CostModel) -> UnitTimes:
    """Chunks against the cost model."""
    return UnitTimes(chunks.kinds, chunks.rank, chunks.kind, chunks.us, predicted_us(chunks, cost))


def loads(times: UnitTimes) -> Residuals:
    """Per rank and kind the median residual; work without a positive time or an expectation is not judged.

    The pieces are put in order first, so that the order in which they came is nothing, to the last digit.
    """
    predicted = times.expected_us
    n_kinds = max(len(times.kinds), 1)
    ranks, row = np.unique(times.rank, return_inverse=True)
    cell = row * n_kinds + times.kind
    known = np.flatnonzero((predicted > 0) & (times.us > 0))
    log_ratio = np.log(times.us[known] / predicted[known])
    order = np.lexsort((predicted[known], log_ratio, cell[known]))
    known, log_ratio = known[order], log_ratio[order]
    cell, predicted, measured = cell[known], predicted[known], times.us[known]
    size = len(ranks) * n_kinds
    count = np.bincount(cell, minlength=size)
    first = np.cumsum(count) - count
    filled = np.flatnonzero(count)
    low, high = first[filled] + (count[filled] - 1) // 2, first[filled] + count[filled] // 2
    medians = np.full(size, np.nan)
    medians[filled] = (log_ratio[low] + log_ratio[high]) / 2
    by_kind = medians.reshape(-1, n_kinds)
    weight = np.bincount(cell, weights=predicted, minlength=size).reshape(-1, n_kinds)
    total = weight.sum(axis=1)
    seen = total > 0
    by_kind, weight, total = by_kind[seen], weight[seen], total[seen]
    together = np.nansum(by_kind * weight, axis=1) / total
    spent = np.bincount(cell // n_kinds, weights=measured, minlength=len(ranks))[seen]
    return Residuals(tuple(ranks[seen].tolist()), (*times.kinds, ALL), np.column_stack([by_kind, together]), spent, total)


def median_of(ordered: Floats) -> float:
    """Of values in order, none of them nan: numpy's own looks for both, which takes ten times as long for few values."""
    n = len(ordered)
    return float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def rank_ratios(load: Residuals, scored: tuple[int, ...], score: Floats) -> tuple[RankRatio, ...]:
    """The ranks seen, for the log. `score`, of the ranks `scored`: the highest sum of a rank's tests over the threshold; above
    1.0 it decides."""
    rows = [scored.index(rank) for rank in load.ranks] if load.ranks != scored else slice(None)
    ratio = np.round(np.exp(load.residual), 4)
    by_kind = {kind: [v if v > 0 else None for v in ratio[:, i].tolist()] for i, kind in enumerate(load.kinds)}
    none = [None] * len(load.ranks)
    return tuple(
        RankRatio(rank=rank, measured_us=round(us), healthy_us=round(predicted), f=f, b=b, w=w, score=round(s, 3))
        for rank, us, predicted, f, b, w, s in zip(
            load.ranks,
            load.measured_us.tolist(),
            load.predicted_us.tolist(),
            by_kind.get("F", none),
            by_kind.get("B", none),
            by_kind.get("W", none),
            score[rows].tolist(),
            strict=True,
        )
    )
