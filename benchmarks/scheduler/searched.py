"""AdaPtis' searched plans on the sleeping device: what they gain over 1F1B there, and that a run is as fast after a fault has
healed as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.pipeline.prediction import predict_iterations
from unskew.benchmarks.loop.slow import works_of
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun
from unskew.collector.events import IterationCommitted, IterationJudged, PlanApplied, PredictorFitted
from unskew.runtime.options import RunOptions

SEARCHED = msgspec.structs.replace(
    EIGHT_RANKS, device="sleep", schedule="searched", iterations=40, tokens=512, checkpoint_every=0
)
"""Searched plans have chunks of one layer. They sleep for ten milliseconds, so that eight ranks' own work leaves the cores
free for most of the time, and nothing is written beside it: the first checkpoint alone makes an iteration 0.3 s longer."""
AT, UNTIL, END = 24, 40, 90
"""A rank is slow from one iteration to another; the run has so many."""
WARM_UP, LAST = 10, 20
"""Before the predictor is fitted, and while start-up lasts, nothing counts; so many at the end are after healing."""


def figures(bench: Bench, base: RunOptions = SEARCHED) -> Iterator[Figure]:
    """The gain against what was predicted of it; throughput after a fault against before."""
    runs = {name: bench.run(msgspec.structs.replace(base, schedule=name)) for name in bench.steps("gain", ("searched", "1f1b"))}
    failure = "; ".join(run.failure for run in runs.values() if run.failure)
    measured, predicted = (ratio(mean_us(runs["1f1b"], of), mean_us(runs["searched"], of)) for of in ("measured", "predicted"))
    yield figure(
        "a searched plan over 1F1B: measured gain against the predicted one",
        None if measured is None or predicted is None else 100 * abs(measured / predicted - 1), "%", bar=3.0, better="lower",
        note=failure or f"the same batches; measured {measured or 0:.3f}, predicted {predicted or 0:.3f} times as fast",
    )  # fmt: skip
    (healed,) = (
        bench.run(msgspec.structs.replace(base, iterations=END), f"slow:rank=1,factor=2,at={AT},until={UNTIL}")
        for _ in bench.steps("a slow rank that heals", (1,))
    )
    yield healed_figure(healed)


def healed_figure(run: FinishedRun) -> Figure:
    """Throughput at the end over before: neither lost nor, which would be as strange, won."""
    back = as_fast_again(run)
    return figure(
        "a searched plan, a slow rank that heals: throughput at the end against before",
        None if back is None else 100 * abs(back - 1), "%", bar=1.0, better="lower",
        note=run.failure or f"{100 * (back or 0):.1f} % of it; {len(run.of(PlanApplied)) - 1} changes of plan; both over the "
        "first plan's prediction",
    )  # fmt: skip


def mean_us(run: FinishedRun, of: str) -> float | None:
    """Of the judged iterations after warm-up, measured or predicted."""
    judged = [one for one in run.of(IterationJudged) if one.iteration >= WARM_UP and one.predicted_us is not None]
    return fmean(one.measured_us if of == "measured" else one.predicted_us or 0 for one in judged) if judged else None


def ratio(one: float | None, other: float | None) -> float | None:
    """None where one of them is not known."""
    return one / other if one is not None and other else None


def as_fast_again(run: FinishedRun) -> float | None:
    """Throughput of the last iterations over that before the fault, by what the first plan should take for both batches."""
    fits = run.of(PredictorFitted)
    if not fits or run.failure:
        return None
    measured_us: dict[int, int] = {}
    for commit in run.of(IterationCommitted):
        measured_us[commit.iteration] = max(commit.wall_us, measured_us.get(commit.iteration, 0))
    works, cost = works_of(run), msgspec.convert(fits[0].model, CostModel)
    due_us = dict(zip(works, predict_iterations(run.options.first_plan(), list(works.values()), cost), strict=True))
    (at,) = (fault.at_iteration for fault in run.options.faults)
    before, after = (
        fmean(measured_us[one] for one in part) / fmean(due_us[one] for one in part)
        for part in (range(WARM_UP, at), range(run.options.iterations - LAST, run.options.iterations))
    )
    return float(before / after)
