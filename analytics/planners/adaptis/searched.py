"""A searched plan for a run's own cost model: what schedule `searched` starts with."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.planners.adaptis.task import AdaptisResult, AdaptisTask
from unskew.analytics.planners.adaptis.tune import tune
from unskew.collector.events import CHUNK_KINDS

EVALUATIONS = 100  # each process of a run searches for itself: some tenths of a second


def searched_plan(*, pp: int, dp: int, n_layers: int, micro_batches: int, cost: CostModel, tokens: int) -> Plan:
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
    return _search(pp, n_layers, micro_batches // dp, (*layer_us, *head_us), cost.message_us).plan(replicas=dp)


@lru_cache(maxsize=8)
def _search(pp: int, n_layers: int, micro_batches: int, costs: tuple[float, ...], message_us: float) -> AdaptisResult:
    units = np.tile(np.array(costs[:3])[:, None], n_layers)
    units[:, -1] += costs[3:]
    task = AdaptisTask(
        costs_us=units, speeds=(1.0,) * pp, micro_batches=micro_batches, kept=np.ones(n_layers), message_us=message_us
    )
    return tune(task, evaluations=EVALUATIONS)
