"""Partition, placement and schedule of one pipeline tuned together by the bubble-aware rule (AdaPtis/OctoPipe, arXiv
2509.23722).

The paper's text could not be read; the rule is the one restated from its Algorithm 1, the moves are ours where no source gives
them. Steps of `tune`:

1. baselines: 1F1B, interleaved 1F1B (2 ranges per device) and ZB-H1 on the usual partition (equal counts of blocks, embedding
   and head with the first and last); the most that one of them keeps on a device is the limit, unless one is given;
2. starts: 1 to 4 ranges per device, in a loop or there and back, with the loads of the devices balanced (layouts.py), each
   scheduled by `dispatch`; the best few are tuned;
3. each round looks at the timeline: with d = largest less smallest idle time of a device,

       d > the smallest unit's time in the iteration   -> partition: units over the boundaries of stages
       else sum of boundary idle > sum of gaps         -> placement: stages to other devices, split, joined
       else                                            -> schedule: the knobs of `dispatch`

   takes the first improving move of that kind that it meets in random order (seeded), tries the other kinds when there is
   none, and when nothing improves goes on from the best so far with two random moves, until the evaluations are used up;
4. the answer is the best of tuned and baselines, as orders (split backward) that the runtime can execute
   (`AdaptisResult.plan`), weights' gradients as early as there is time for them (early.py); its time is the evaluator's, not
   the search's.
"""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np

from unskew.analytics.core.plan import PlanError, splits_backward, stage_order_of
from unskew.analytics.pipeline.memory import peak_activations
from unskew.analytics.pipeline.schedule import per_hop, pipeline_of
from unskew.analytics.planners.adaptis.bound import lower_bound_us
from unskew.analytics.planners.adaptis.dispatch import Step
from unskew.analytics.planners.adaptis.early import weights_early
from unskew.analytics.planners.adaptis.layouts import PipelineLayout, start_layouts, usual
from unskew.analytics.planners.adaptis.search import AdaptisSearch
from unskew.analytics.planners.adaptis.task import (
    AdaptisResult,
    AdaptisTask,
    answer_of,
    gains,
    most_kept,
    stage_costs,
    stage_kept,
    untimed,
)
from unskew.collector.events import CHUNK_KINDS

__all__ = ["BASELINES", "gains", "tune"]

BASELINES = ("1f1b", "interleaved", "zb-h1")
"""What the answer is never worse than, and whose activations it may keep."""

STARTS = 3


def tune(task: AdaptisTask, *, evaluations: int = 600) -> AdaptisResult:
    """The best pipeline found with at most about `evaluations` dispatches. Raises `PlanError` when there are fewer units than
    devices, or when no order stays within the task's limit."""
    if task.n_units < len(task.speeds):
        raise PlanError(f"{task.n_units} units cannot fill {len(task.speeds)} devices: at least one unit per device is needed")
    baselines = {name: found for name in BASELINES if (found := _baseline(task, name)) is not None}
    limit = max(found.kept_peak for found in baselines.values()) if task.limit is None else task.limit
    search = AdaptisSearch(task, limit)
    seeds = sorted(
        (search.seed(layout) for layout in start_layouts(task.costs_us.sum(axis=0), task.speeds)), key=lambda s: s.us
    )
    best = seeds[0]
    for number, seed in enumerate(seeds[:STARTS]):
        tuned = search.climb(seed, evaluations * (number + 1) // STARTS)
        best = min(best, tuned, key=lambda state: state.us)
    answers = [answer_of(task, found.layout, found.lists) for found in baselines.values() if found.kept_peak <= limit]
    if best.us < inf:
        answers.append(answer_of(task, best.layout, best.found.lists))
    if not answers:
        raise PlanError(f"no order keeps what a device has within {limit:g}")
    answer = weights_early(task, min(answers, key=lambda found: found.makespan_us))
    return msgspec.structs.replace(
        answer,
        baselines_us={name: found.makespan_us for name, found in baselines.items()},
        bound_us=lower_bound_us(task),
        evaluations=search.used,
    )


def _baseline(task: AdaptisTask, name: str) -> AdaptisResult | None:
    """A schedule on the usual partition; None when the units or the micro-batches do not allow it."""
    devices = len(task.speeds)
    stage_order = tuple(stage_order_of(name, range(devices)))
    if task.n_units < len(stage_order) or (name == "interleaved" and task.micro_batches % devices):
        return None
    layout = PipelineLayout(usual(task.n_units, len(stage_order)), stage_order)
    chunks = pipeline_of(name, ranks=devices, micro_batches=task.micro_batches)
    stages = stage_costs(task, layout)
    whole = stages if splits_backward(name) else np.stack([stages[0], stages[1] + stages[2]])
    makespan = float(chunks.makespan_us(per_hop(chunks, whole), task.message_us))
    lists = []
    for _, positions in chunks.rank_positions():
        steps: list[Step] = []
        for position in positions.tolist():
            kind, hop, number = CHUNK_KINDS[chunks.kind[position]], int(chunks.hop[position]), int(chunks.micro_batch[position])
            steps.append((kind, hop, number))
            if kind == "B" and not splits_backward(name):
                steps.append(("W", hop, number))
        lists.append(tuple(steps))
    return msgspec.structs.replace(
        untimed(layout, tuple(lists)),
        makespan_us=makespan,
        kept_peak=most_kept(task, layout, peak_activations(chunks, stage_kept(task, layout))),
    )
