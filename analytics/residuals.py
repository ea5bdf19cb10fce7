"""How far a rank's chunks are from their prediction, and with whom a rank can be compared.

A residual is ``log(measured / predicted for a healthy device)``, per rank and kind the median over the iteration's chunks:
0 = as predicted, log 1.8 = 1.8 times as long. Prediction already knows the lengths; the company covers what it does not:

* peers: ranks of equal role (they hold a common layer) in other replicas, with other micro-batches;
* mates: ranks that execute the same micro-batches on other layers. A heavy batch shifts all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from statistics import median

import msgspec

from unskew.analytics.cost import CostModel
from unskew.analytics.plan import Plan
from unskew.analytics.predictor import Chunk

ALL = "all"  # every kind of work together, weighted by predicted time


class Load(msgspec.Struct, frozen=True):
    """One rank's iteration: residual per kind and over `ALL`, and the sums behind them (us)."""

    residual: dict[str, float]
    measured_us: float
    predicted_us: float


class Company(msgspec.Struct, frozen=True):
    """Per rank, whom it is compared with under the plan of this digest."""

    digest: str
    peers: dict[int, tuple[int, ...]]
    mates: dict[int, tuple[int, ...]]


NOBODY = Company("", {}, {})


class Excess(msgspec.Struct, frozen=True, gc=False):
    """A rank's residual against each reference that exists; None = there is no such reference."""

    own: float
    peers: float | None = None
    mates: float | None = None

    @property
    def least(self) -> float:
        """What remains of a slowness after every excuse."""
        return min(self._values())

    @property
    def most(self) -> float:
        """What remains of a recovery after every excuse (residuals fall when a device recovers)."""
        return max(self._values())

    def _values(self) -> list[float]:
        return [value for value in (self.own, self.peers, self.mates) if value is not None]


def loads(chunks: Iterable[Chunk], cost: CostModel) -> dict[int, Load]:
    """rank -> load. Chunks of a kind that the model does not know, or without a positive time, are not judged."""
    logs: dict[int, dict[str, list[float]]] = {}
    sums: dict[int, dict[str, tuple[float, float]]] = {}
    for chunk in chunks:
        if chunk.kind not in cost.chunks:
            continue
        predicted = cost.chunk_us(chunk.kind, chunk.work, chunk.n_layers, has_head=chunk.has_head)
        if chunk.us <= 0 or predicted <= 0:
            continue
        logs.setdefault(chunk.rank, {}).setdefault(chunk.kind, []).append(log(chunk.us / predicted))
        measured_sum, predicted_sum = sums.setdefault(chunk.rank, {}).get(chunk.kind, (0.0, 0.0))
        sums[chunk.rank][chunk.kind] = (measured_sum + chunk.us, predicted_sum + predicted)
    found = {}
    for rank, by_kind in sorted(logs.items()):
        residual = {kind: median(values) for kind, values in sorted(by_kind.items())}
        measured = sum(pair[0] for pair in sums[rank].values())
        predicted = sum(pair[1] for pair in sums[rank].values())
        residual[ALL] = sum(residual[kind] * sums[rank][kind][1] for kind in by_kind) / predicted
        found[rank] = Load(residual, measured, predicted)
    return found


def company_of(plan: Plan) -> Company:
    """Peers and mates of every rank of the plan."""
    layer_holders: list[set[int]] = [set() for _ in range(plan.n_layers)]
    for role in plan.roles:
        for layer in range(role.first_layer, role.end_layer):
            layer_holders[layer].add(role.rank)
    peers: dict[int, set[int]] = {rank: set() for rank in plan.ranks}
    mates: dict[int, set[int]] = {rank: set() for rank in plan.ranks}
    for role in plan.roles:
        peers[role.rank].update(*layer_holders[role.first_layer : role.end_layer])
    for path in {tuple(rank for hop in route.hops for rank in hop.ranks) for route in plan.routes}:
        for rank in path:
            mates[rank].update(path)
    return Company(
        plan.digest,
        {rank: tuple(sorted(peers[rank] - {rank})) for rank in plan.ranks},
        {rank: tuple(sorted(mates[rank] - peers[rank] - {rank})) for rank in plan.ranks},
    )


def excess_of(rank: int, kind: str, own: float, others: Mapping[tuple[int, str], float], company: Company) -> Excess:
    """The rank's residual `own`, and what it exceeds the median of its peers and of its mates by.

    `others` holds (rank, kind) -> residual less what is believed of that rank, so that a known slowness is no excuse.
    """

    def over(ranks: Iterable[int]) -> float | None:
        values = [others[other, kind] for other in ranks if (other, kind) in others]
        return own - median(values) if values else None

    return Excess(own, over(company.peers.get(rank, ())), over(company.mates.get(rank, ())))
