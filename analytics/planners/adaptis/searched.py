"""Searched plans for a run: what schedule `searched` starts with, and the search anew when its ranks are no longer alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.layout import Layout, Pipeline, rank_layout
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.memory import Room
from unskew.analytics.planners.adaptis.task import AdaptisResult, AdaptisTask, plan_of
from unskew.analytics.planners.adaptis.tune import tune
from unskew.collector.events import CHUNK_KINDS

RankTimes = tuple[tuple[float, ...], tuple[float, ...]]
"""Microseconds of F, B and W of a mean micro-batch on a rank: of one layer, and of the output head."""
_Memory = tuple[tuple[float, ...], tuple[float, ...], float]
"""Bytes: of each layer what a micro-batch keeps, and what it takes by itself; what a rank has room for."""

EVALUATIONS = 100  # each process of a run searches for itself: some tenths of a second


def searched_plan(
    *, pp: int, dp: int, n_layers: int, micro_batches: int, cost: CostModel, tokens: int, layer_weights: tuple[float, ...] = ()
) -> Plan:
    """AdaPtis' answer for `dp` equal replicas of `pp` healthy ranks, a pure function of its arguments; `tokens` of one document
    is the typical micro-batch. Raises `PlanError`."""
    if micro_batches % dp:
        raise PlanError(f"schedule=searched needs equal replicas: micro_batches={micro_batches} is no multiple of dp={dp}")
    if n_layers < pp:
        raise PlanError(f"layers={n_layers} cannot fill pp={pp} stages: at least one layer per stage is needed")
    kinds = cost.split
    work = Work(tokens, tokens * tokens)
    layer_us = tuple(kinds.chunk_us(kind, work, 1, has_head=False) for kind in CHUNK_KINDS)
    head_us = tuple(kinds.chunk_us(kind, work, 0, has_head=True) for kind in CHUNK_KINDS)
    weights = layer_weights or (1.0,) * n_layers
    message_us = cost.message_us + cost.message_token_us * tokens
    found = _search((1.0,) * pp, weights, micro_batches // dp, (*layer_us, *head_us), message_us)
    return msgspec.structs.replace(found.plan(replicas=dp), layer_weights=layer_weights)


def searched_anew(
    plan_version: int,
    replicas: Sequence[tuple[Sequence[int], int]],
    times_us: Mapping[int, RankTimes],
    *,
    message_us: float,
    n_layers: int,
    layer_weights: tuple[float, ...] = (),
    room: Room | None = None,
) -> Plan:
    """A plan in which each of `replicas` (its ranks, its micro-batches) is searched for at its ranks' speeds, equal ones once,
    within the room of a rank.

    Raises `PlanError` when one has fewer layers than ranks, leaves a rank out, or finds no room.
    """
    memory = None
    if room is not None:
        kept = room.memory.kept(1.0, room.tokens)
        memory = tuple(kept.tolist()), tuple(room.memory.held.tolist()), room.rank_bytes
    used = [(tuple(ranks), count) for ranks, count in replicas if ranks and count]
    found = []
    for ranks, count in used:
        fastest = min((times_us[rank] for rank in ranks), key=lambda times: sum(times[0]))
        speeds = tuple(round(sum(fastest[0]) / sum(times_us[rank][0]), 3) for rank in ranks)
        costs = tuple(round(us, 1) for part in fastest for us in part)
        found.append((ranks, _search(speeds, layer_weights or (1.0,) * n_layers, count, costs, message_us, memory=memory)))
    plan = plan_of(found, plan_version=plan_version)
    if idle := sorted({rank for ranks, _ in used for rank in ranks} - set(plan.ranks)):
        raise PlanError(f"rank {idle[0]} would be left out")
    return msgspec.structs.replace(plan, layer_weights=layer_weights)


def searched_layout(plan: Plan) -> Layout:
    """The pipelines of a searched plan, without their order."""
    first = {route.replica: route for route in reversed(plan.routes)}
    counts = Counter(route.replica for route in plan.routes)
    hops = [first[replica].hops for replica in sorted(first)]
    return rank_layout(
        [[hop.rank for hop in one] for one in hops],
        [[hop.n_layers for hop in one] for one in hops],
        [counts[replica] for replica in sorted(first)],
        "searched",
    )


def holding_layout(plan: Plan) -> Layout:
    """A plan whose micro-batches take paths of their own; its pipelines say how many layers each rank holds."""
    roles = [
        [role for role in plan.roles if role.replica == replica] for replica in sorted({one.replica for one in plan.roles})
    ]
    homes = Counter(route.replica for route in plan.routes)
    pipelines = (
        Pipeline(
            row[0].replica, tuple((role.rank,) for role in row), tuple(len(role.layers) for role in row), homes[row[0].replica]
        )
        for row in roles
    )
    return Layout(tuple(pipelines), schedule=plan.schedule, routed=plan)


@lru_cache(maxsize=32)
def _search(
    speeds: tuple[float, ...],
    weights: tuple[float, ...],
    micro_batches: int,
    costs: tuple[float, ...],
    message_us: float,
    *,
    memory: _Memory | None = None,
) -> AdaptisResult:
    units = np.array(costs[:3])[:, None] * np.array(weights)
    units[:, -1] += costs[3:]
    kept, held, limit = memory or ((1.0,) * len(weights), (), None)
    task = AdaptisTask(
        costs_us=units, speeds=speeds, micro_batches=micro_batches, kept=np.array(kept), message_us=message_us, held=held,
        limit=limit,
    )  # fmt: skip
    return tune(task, evaluations=EVALUATIONS)
