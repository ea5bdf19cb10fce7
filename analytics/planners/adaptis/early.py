"""Weights' gradients as early as a searched order has time for them.

The search looks at the makespan alone, for which it is all the same whether a W is done while its device waits for a message or
behind its last B. For the sums of gradients it is not: a layer's can begin once its last W is done, and what is executed after
that hides it (pipeline/gradient_sync.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from unskew.analytics.pipeline.schedule import build_schedule, evaluate, per_hop
from unskew.analytics.planners.adaptis.dispatch import Step
from unskew.analytics.planners.adaptis.task import AdaptisResult, AdaptisTask, answer_of, stage_costs

ROUNDING = 1e-9


def weights_early(task: AdaptisTask, found: AdaptisResult) -> AdaptisResult:
    """The same order but for weights' gradients, each as soon as nothing that another device waits for begins later for it. No
    device keeps more."""
    schedule = build_schedule(found.plan())
    durations = per_hop(schedule.chunks, stage_costs(task, found.layout))
    begin_us = evaluate(schedule, durations, task.message_us).start_us
    lists = list(found.lists)
    for device, positions in schedule.chunks.rank_positions():
        lists[device] = _moved_up(found.lists[device], begin_us[positions].tolist(), durations[positions].tolist())
    return answer_of(task, found.layout, tuple(lists))


def _moved_up(steps: Sequence[Step], begin_us: Sequence[float], took_us: Sequence[float]) -> tuple[Step, ...]:
    """A device's steps, which began then and took so long, with each W as early as it may be."""
    number_of = {step: number for number, step in enumerate(steps)}
    done, waiting, now_us = dict[int, None](), list[int](), 0.0

    def may_begin(weights: int, before: int) -> bool:
        """Whether a W may go before a step, and those between it and its own place."""
        at_us = now_us + took_us[weights]
        for number in range(before, weights):
            kind, stage, _ = steps[number]
            if number in done:
                continue
            if at_us <= begin_us[number] * (1 + ROUNDING):
                return True
            if kind == "F" or (kind == "B" and stage > 0):
                return False
            at_us += took_us[number]
        return True

    for number, (kind, stage, micro_batch) in enumerate(steps):
        if number in done:
            continue
        for weights in waiting:
            if weights != number and may_begin(weights, number):
                now_us += took_us[weights]
                done[weights] = None
        now_us = max(now_us, begin_us[number]) + took_us[number]
        done[number] = None
        waiting = [one for one in waiting if one not in done]
        if kind == "B":
            waiting.append(number_of["W", stage, micro_batch])
    return tuple(steps[number] for number in done)
