"""How far a rank's chunks are from their prediction, and with whom a rank can be compared.

A residual is ``log(measured / predicted for a healthy device)``, per rank and kind the median over the iteration's chunks:
0 = as predicted, log 1.8 = 1.8 times as long. Prediction already knows the lengths; the company covers what it does not:

* peers: ranks of equal role (they hold a common layer) in other replicas, with other micro-batches;
* mates: ranks that execute the same micro-batches on other layers. A heavy batch shifts all of them alike.

Everything is arrays [rank, kind]; nan = not seen in this iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import CostModel, Costs
from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.plan import Plan

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


class ChunkColumns(msgspec.Struct, frozen=True):
    """Chunks as columns, each (n,): `kind` is an index into `kinds`; `tp` how many ranks executed it together."""

    kinds: tuple[str, ...]
    rank: Ints
    kind: Ints
    n_layers: Floats
    head: Floats
    tokens: Floats
    sum_sq: Floats
    tp: Ints
    us: Floats


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
    )


def predicted_us(chunks: ChunkColumns, cost: CostModel) -> Floats:
    """(n,): what each chunk takes on a healthy device; nan for a kind that the model does not know."""
    if not len(chunks.rank):
        return np.zeros(0)

    def terms_of(costs: Costs) -> list[tuple[float, ...]]:
        unknown = (np.nan,) * 4
        found = (costs.get(kind) for kind in chunks.kinds)
        return [(c.layer_us, c.token_us, c.token2_us, c.head_us_per_token) if c else unknown for c in found]

    class_of = np.zeros(int(chunks.rank.max()) + 1, dtype=np.int64)
    for number, ranks in enumerate(cost.classes.values(), start=1):
        class_of[[rank for rank in ranks if rank < len(class_of)]] = number
    degrees, degree = np.unique(chunks.tp, return_inverse=True) if np.ptp(chunks.tp) else (chunks.tp[:1], np.int64(0))
    table = [[terms_of(cost.costs_at((name, tp))) for tp in degrees.tolist()] for name in ("", *cost.classes)]
    terms = np.array(table)[class_of[chunks.rank], degree, chunks.kind]
    per_layer = terms[:, 0] + terms[:, 1] * chunks.tokens + terms[:, 2] * chunks.sum_sq
    return np.asarray(chunks.n_layers * per_layer + chunks.head * terms[:, 3] * chunks.tokens)


def loads(chunks: ChunkColumns, cost: CostModel) -> Residuals:
    """Per rank and kind the median residual; chunks without a positive time or a prediction are not judged.

    The chunks are put in order first, so that the order in which they came is nothing, to the last digit.
    """
    predicted = predicted_us(chunks, cost)
    n_kinds = max(len(chunks.kinds), 1)
    ranks, row = np.unique(chunks.rank, return_inverse=True)
    cell = row * n_kinds + chunks.kind
    known = np.flatnonzero((predicted > 0) & (chunks.us > 0))
    log_ratio = np.log(chunks.us[known] / predicted[known])
    order = np.lexsort((predicted[known], log_ratio, cell[known]))
    known, log_ratio = known[order], log_ratio[order]
    cell, predicted, measured = cell[known], predicted[known], chunks.us[known]
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
    return Residuals(tuple(ranks[seen].tolist()), (*chunks.kinds, ALL), np.column_stack([by_kind, together]), spent, total)


class PeerSets(msgspec.Struct, frozen=True):
    """Sets of rows: `members` [set, size] (-1 = none); `of` [row]: the set that a row is compared with, itself in it (-1 =
    none)."""

    members: Ints
    of: Ints


class PeerGroups(msgspec.Struct, frozen=True):
    """Whom each rank is compared with under the plan of this digest; `ranks` are the rows of the arrays, `layers` what
    each holds."""

    digest: str
    ranks: tuple[int, ...]
    layers: dict[int, tuple[int, ...]]
    stage_of: dict[int, int]
    data_parallel_peers: dict[int, tuple[int, ...]]
    pipeline_peers: dict[int, tuple[int, ...]]
    peer_groups: PeerSets
    mate_groups: PeerSets


def company_of(plan: Plan, ranks: tuple[int, ...]) -> PeerGroups:
    """Peers and mates of every rank of the plan; `ranks` are the rows of the detector's arrays."""
    layers = {role.rank: role.layers for role in plan.roles}
    stage_of = {role.rank: role.stage for role in plan.roles}
    layer_holders: list[set[int]] = [set() for _ in range(plan.n_layers)]
    for rank, held in layers.items():
        for layer in held:
            layer_holders[layer].add(rank)
    data_parallel_peers: dict[int, set[int]] = {rank: set() for rank in plan.ranks}
    pipeline_peers: dict[int, set[int]] = {rank: set() for rank in plan.ranks}
    for rank, held in layers.items():
        data_parallel_peers[rank].update(*(layer_holders[layer] for layer in held))
    for path in {tuple(rank for hop in route.hops for rank in hop.ranks) for route in plan.routes}:
        for rank in path:
            pipeline_peers[rank].update(path)
    by_data_parallel_peers = {rank: tuple(sorted(data_parallel_peers[rank] - {rank})) for rank in plan.ranks}
    by_pipeline_peers = {rank: tuple(sorted(pipeline_peers[rank] - data_parallel_peers[rank] - {rank})) for rank in plan.ranks}
    return PeerGroups(
        plan.digest,
        ranks,
        layers,
        stage_of,
        by_data_parallel_peers,
        by_pipeline_peers,
        _groups(by_data_parallel_peers, ranks),
        _groups(by_pipeline_peers, ranks),
    )


def _groups(others: Mapping[int, tuple[int, ...]], ranks: tuple[int, ...]) -> PeerSets:
    """Ranks that share one set with themselves in it (replicas, roles) share one row of `members`."""
    row_of = {rank: row for row, rank in enumerate(ranks)}
    sets: dict[tuple[int, ...], int] = {}
    of = np.full(len(ranks), -1, dtype=np.int64)
    for rank, company in others.items():
        if rank in row_of:
            rows = tuple(sorted(row_of[r] for r in {rank, *company} if r in row_of))
            of[row_of[rank]] = sets.setdefault(rows, len(sets))
    members = np.full((len(sets), max(map(len, sets), default=0)), -1, dtype=np.int64)
    for rows, number in sets.items():
        members[number, : len(rows)] = rows
    return PeerSets(members, of)


def median_of_others(values: Floats, groups: PeerSets) -> tuple[Floats, Ints]:
    """[row, kind]: the median over a row's group without the row itself, nan where there is nobody else; and how many they are.

    One sort per group; leaving one value out of a sorted list moves its middle by at most one place.
    """
    n_rows, n_kinds = values.shape
    if groups.members.size == 0:
        return np.full(values.shape, np.nan), np.zeros(values.shape, np.int64)
    padded = np.vstack([values, np.full((1, n_kinds), np.nan)])
    inside = padded[groups.members]  # [group, member, kind]; nan sorts to the end
    order = np.argsort(inside, axis=1, kind="stable")
    ordered = np.take_along_axis(inside, order, axis=1)
    count = np.sum(~np.isnan(inside), axis=1)  # [group, kind]
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(order.shape[1])[None, :, None], order.shape), axis=1)
    position = np.full((n_rows + 1, n_kinds), -1, dtype=np.int64)
    own_group = np.broadcast_to(np.arange(len(groups.members))[:, None], groups.members.shape)
    mine = groups.of[np.where(groups.members >= 0, groups.members, 0)] == own_group
    mine &= groups.members >= 0
    position[groups.members[mine]] = place[mine]
    at = groups.of
    total = count[at]  # [row, kind]
    seen = ~np.isnan(values)
    others = np.where(at[:, None] >= 0, total - seen, 0)
    low, high = (others - 1) // 2, others // 2
    where = position[:n_rows]
    skip = seen & (where <= low)
    low = low + skip
    high = high + (seen & (where <= high))
    rows = np.maximum(at, 0)[:, None]
    kinds = np.arange(n_kinds)[None, :]
    last = ordered.shape[1] - 1
    middle = (ordered[rows, np.clip(low, 0, last), kinds] + ordered[rows, np.clip(high, 0, last), kinds]) / 2
    return np.where(others > 0, middle, np.nan), others


def agreement(values: Floats, groups: PeerSets) -> Floats:
    """[row, kind]: what a row's group agrees on: the median of three or more, of two the one nearer to zero, nan for one."""
    if groups.members.size == 0:
        return np.full(values.shape, np.nan)
    padded = np.vstack([values, np.full((1, values.shape[1]), np.nan)])
    inside = np.sort(padded[groups.members], axis=1)  # [group, member, kind]; nan sorts to the end
    count = np.sum(~np.isnan(inside), axis=1)
    low, high = np.maximum(count - 1, 0) // 2, np.maximum(count, 1) // 2
    high = np.minimum(high, inside.shape[1] - 1)
    one, other = (np.take_along_axis(inside, at[:, None, :], axis=1)[:, 0] for at in (low, high))
    nearer = np.where(np.abs(one) <= np.abs(other), one, other)
    agreed = np.where(count > 2, (one + other) / 2, np.where(count == 2, nearer, np.nan))
    return np.where(groups.of[:, None] >= 0, agreed[np.maximum(groups.of, 0)], np.nan)
