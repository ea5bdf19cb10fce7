"""The terms of an iteration that no chunk shows: messages, gradient collectives, and the end (vote, optimiser).

All are offsets of one plan's iteration time, so totals alone cannot separate them: messages and collectives are measured from
the moment all sides had come, the end is what then remains, ``median(measured iteration - predicted without it)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.predictor.fit import Fit, NotIdentifiable, prediction_interval


class TimedIteration(msgspec.Struct, frozen=True):
    """One committed iteration: its plan, the work of its micro-batches in order, its time (us)."""

    plan: Plan
    works: tuple[Work, ...]
    us: float


def fit_terms(
    fitted: Fit,
    iterations: Sequence[TimedIteration],
    predict_us: Callable[[Plan, Sequence[Work], CostModel], float],
    transfers_us: Sequence[float] = (),
    collectives_us: Sequence[float] = (),
) -> Fit:
    """The fit with `message_us` and `iteration_end_us` set so that predicted iterations match the measured ones.

    `predict_us` is the evaluator at the estimated speeds; `transfers_us` are times of single messages from the moment both
    sides were ready (none: messages are free and the end carries them), `collectives_us` of gradient collectives likewise.
    `error_percent` gains "iteration": mean absolute relative error of the odd iterations when the end is learned from the
    even ones (its prediction interval likewise). Raises `NotIdentifiable` without an iteration.
    """
    if not iterations:
        raise NotIdentifiable("no iteration to learn the iteration's end from: at least one committed iteration is needed")
    bare = msgspec.structs.replace(
        fitted.model,
        message_us=max(0.0, median(transfers_us)) if transfers_us else 0.0,
        collective_us=max(0.0, median(collectives_us)) if collectives_us else 0.0,
        iteration_end_us=0.0,
    )
    makespans = [predict_us(seen.plan, seen.works, bare) for seen in iterations]
    remains = [seen.us - makespan for seen, makespan in zip(iterations, makespans, strict=True)]
    half_end = max(0.0, median(remains[::2]))
    tested = list(zip(iterations, makespans, strict=True))[1::2] or [(iterations[0], makespans[0])]
    ratios = [(makespan + half_end) / seen.us for seen, makespan in tested]
    interval = prediction_interval(ratios)
    return msgspec.structs.replace(
        fitted,
        model=msgspec.structs.replace(
            bare,
            iteration_end_us=max(0.0, median(remains)),
            prediction_intervals=fitted.model.prediction_intervals
            if interval is None
            else {**fitted.model.prediction_intervals, "iteration": interval},
        ),
        error_percent={**fitted.error_percent, "iteration": 100 * fmean(abs(ratio - 1) for ratio in ratios)},
    )
