"""With whom a rank can be compared: the company covers what a prediction does not know.

* peers: ranks of equal role (they hold a common layer) in other replicas, with other micro-batches;
* pipeline peers: ranks that execute the same micro-batches on other layers. A heavy batch shifts all of them alike.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

import msgspec
import numpy as np

from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.residuals import Flags, Floats, Ints


class UnitRoles(msgspec.Struct, frozen=True, dict=True):
    """What each rank does: `layers` it holds (of ranks of which no layers are known: the number of their role), its `stage_of`
    the pipeline, and `teams` that execute the same micro-batches."""

    layers: dict[int, tuple[int, ...]]
    stage_of: dict[int, int]
    teams: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def equal_roles(role_of: Mapping[int, int], teams: tuple[tuple[int, ...], ...] = ()) -> UnitRoles:
    """Ranks of one number do the same work."""
    return UnitRoles({rank: (role,) for rank, role in role_of.items()}, dict(role_of), teams)


def roles_of(plan: Plan) -> UnitRoles:
    """Who does what under a plan."""
    return UnitRoles(
        {role.rank: role.layers for role in plan.roles},
        {role.rank: role.stage for role in plan.roles},
        tuple({tuple(rank for hop in route.hops for rank in hop.ranks): None for route in plan.routes}),
    )


class PeerSets(msgspec.Struct, frozen=True, dict=True):
    """Sets of rows: `members` [set, size] (-1 = none); `of` [row]: the set that a row is compared with, itself in it (-1 =
    none)."""

    members: Ints
    of: Ints

    @property
    def alone(self) -> bool:
        """Whether nobody is in a set with another: as a job has them whose ranks all do the same work, of pipeline peers."""
        return bool(self.members.shape[1] < 2)

    @cached_property
    def own_places(self) -> tuple[Flags, Ints]:
        """Where in `members` a row stands in the set that it is compared with, and these rows."""
        numbers = np.arange(len(self.members))[:, None]
        mine = (self.of[np.where(self.members >= 0, self.members, 0)] == numbers) & (self.members >= 0)
        return mine, self.members[mine]


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
    pipeline_peer_groups: PeerSets


def company_of(work: Plan | UnitRoles, ranks: tuple[int, ...]) -> PeerGroups:
    """Data-parallel and pipeline peers of everybody; `ranks` are the rows of the detector's arrays."""
    roles = roles_of(work) if isinstance(work, Plan) else work
    holders: dict[int, set[int]] = defaultdict(set)
    for rank, held in roles.layers.items():
        for layer in held:
            holders[layer].add(rank)
    team: dict[int, set[int]] = defaultdict(set)
    for members in roles.teams:
        for rank in members:
            team[rank].update(members)
    peers, pipeline_peers = {}, {}
    for rank, held in sorted(roles.layers.items()):
        same = {rank}.union(*(holders[layer] for layer in held))
        peers[rank] = tuple(sorted(same - {rank}))
        pipeline_peers[rank] = tuple(sorted(team[rank] - same))
    return PeerGroups(
        work.digest,
        ranks,
        roles.layers,
        roles.stage_of,
        peers,
        pipeline_peers,
        _groups(peers, ranks),
        _groups(pipeline_peers, ranks),
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
    if groups.alone:
        return np.full(values.shape, np.nan), np.zeros(values.shape, np.int64)
    padded = np.vstack([values, np.full((1, n_kinds), np.nan)])
    inside = padded[groups.members]  # [group, member, kind]; nan sorts to the end
    order = inside.argsort(axis=1, kind="stable")
    kinds = np.arange(n_kinds)[None, :]
    sets, columns = np.arange(len(inside))[:, None, None], kinds[None]
    ordered = inside[sets, order, columns]
    count = (~np.isnan(inside)).sum(axis=1)  # [group, kind]
    place = np.empty_like(order)
    place[sets, order, columns] = np.arange(order.shape[1])[None, :, None]
    position = np.full((n_rows, n_kinds), -1, dtype=np.int64)
    mine, rows_of_mine = groups.own_places
    position[rows_of_mine] = place[mine]
    at = groups.of
    total = count[at]  # [row, kind]
    seen = ~np.isnan(values)
    others = np.where(at[:, None] >= 0, total - seen, 0)
    low, high = (others - 1) // 2, others // 2
    low = low + (seen & (position <= low))
    high = high + (seen & (position <= high))
    rows = np.maximum(at, 0)[:, None]
    last = ordered.shape[1] - 1
    low, high = (np.minimum(np.maximum(end, 0), last) for end in (low, high))
    middle = (ordered[rows, low, kinds] + ordered[rows, high, kinds]) / 2
    return np.where(others > 0, middle, np.nan), others


def agreement(values: Floats, groups: PeerSets, apart: float) -> Floats:
    """[row, kind]: what a row's group agrees on: the median, nan for one. Of two, and of halves that are `apart`, that of the
    half nearer to zero: nobody knows what they share."""
    if groups.alone:
        return np.full(values.shape, np.nan)
    padded = np.vstack([values, np.full((1, values.shape[1]), np.nan)])
    inside = np.sort(padded[groups.members], axis=1)  # [group, member, kind]; nan sorts to the end
    count = np.sum(~np.isnan(inside), axis=1)

    sets, kinds, last = np.arange(len(inside))[:, None], np.arange(inside.shape[2])[None, :], inside.shape[1] - 1

    def at(place: Ints) -> Floats:
        return np.asarray(inside[sets, np.minimum(np.maximum(place, 0), last), kinds])

    half = count // 2
    lower, upper = at(half - 1), at(half)
    split = (count % 2 == 0) & ((count == 2) | (upper - lower >= apart))
    first = np.where(split & (np.abs(upper) < np.abs(lower)), half, 0)
    n = np.where(split, half, count)
    agreed = np.where(count < 2, np.nan, (at(first + (n - 1) // 2) + at(first + n // 2)) / 2)
    return np.where(groups.of[:, None] >= 0, agreed[np.maximum(groups.of, 0)], np.nan)


def excess_of(own: Floats, unexplained: Floats, has_past: Flags, company: PeerGroups) -> Floats:
    """[reading, rank, kind]: against the rank's own prediction and bias, its data-parallel peers, pipeline peers; nan = no
    such reference.

    A known slowness of the others is no excuse. A single peer is one only until the rank's own past is known: two ranks of one
    role, slowed alike, would excuse each other, and what a role costs is in the bias by then.
    """
    data_parallel_peers, n_peers = median_of_others(unexplained, company.peer_groups)
    pipeline_peers, _ = median_of_others(unexplained, company.pipeline_peer_groups)
    data_parallel_peers = np.where(has_past & (n_peers < 2), np.nan, data_parallel_peers)
    return np.stack([own, own - data_parallel_peers, own - pipeline_peers])
