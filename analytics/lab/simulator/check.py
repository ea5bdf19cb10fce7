"""A real run's plans played by the simulator's evaluator: predicted against measured, plan by plan.

Each committed iteration is predicted from the plan in force, the document lengths of its micro-batches, the run's own cost
model (the last predictor fitted by then, else the first) and the speeds of the verdicts open at that iteration; it is compared
with what the iteration took. One that was begun again after a loss also took what was thrown away of it: it is counted,
not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import predict_iteration


class CheckError(ValueError):
    """A run that cannot be checked; one sentence."""


class PlanCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: `error_percent` = mean over its `n` iterations of |predicted - measured| / measured; `redone`: iterations under
    it that were begun again, which are none of them. None = no iteration was compared."""

    plan_version: int = msgspec.field(name="epoch")
    from_iteration: int
    n: int
    redone: int
    predicted_s: float | None = None
    measured_s: float | None = None
    error_percent: float | None = None


Query = Callable[[str, list[str]], pl.DataFrame]


def check_run(sql: Query, run: str) -> list[PlanCheck]:
    """Every plan of the run that committed iterations. `sql` asks the store. Raises `CheckError`."""
    predictors = sql("select watermark, model from predictors where run = ? order by watermark", [run])
    if predictors.is_empty():
        raise CheckError(f"run {run} has no fitted predictor: there is nothing to predict with")
    models = [(int(mark), msgspec.convert(_data(model), CostModel)) for mark, model in predictors.iter_rows()]
    applied = sql("select plan_version, from_iteration, plan from plans where run = ?", [run])
    plans = {int(version): (int(first), Plan.from_data(_data(plan))) for version, first, plan in applied.iter_rows()}
    verdicts = sql("select culprits, speed, since_iteration, until_iteration from verdicts where run = ?", [run]).rows()
    works = _works(sql, run)
    columns = "iteration, plan_version, attempt, iteration_us"
    rows = sql(f"select {columns} from iterations where run = ? order by iteration", [run]).rows()
    gathered: dict[int, list[tuple[float, float]]] = {}
    redone: Counter[int] = Counter()
    for iteration, plan_version, attempt, measured_us in rows:
        plan = plans[int(plan_version)][1]
        lengths = works.get(int(iteration), {})
        if len(lengths) != len(plan.routes):
            continue
        compared = gathered.setdefault(int(plan_version), [])
        if attempt > 0:
            redone[int(plan_version)] += 1
            continue
        cost = next((model for mark, model in reversed(models) if mark <= iteration), models[0][1])
        predicted = predict_iteration(plan, [lengths[m] for m in range(len(lengths))], cost, _speeds(verdicts, int(iteration)))
        compared.append((predicted.iteration_us, float(measured_us)))
    if not gathered:
        raise CheckError(f"run {run} has no committed iteration whose micro-batches are in the log")
    return [
        _summary(plan_version, plans[plan_version][0], pairs, redone[plan_version])
        for plan_version, pairs in sorted(gathered.items())
    ]


def _summary(plan_version: int, first: int, pairs: list[tuple[float, float]], redone: int) -> PlanCheck:
    if not pairs:
        return PlanCheck(plan_version=plan_version, from_iteration=first, n=0, redone=redone)
    predicted, measured = np.array(pairs).T
    return PlanCheck(
        plan_version=plan_version, from_iteration=first, n=len(pairs), redone=redone, predicted_s=float(predicted.mean() / 1e6),
        measured_s=float(measured.mean() / 1e6), error_percent=float(100.0 * np.abs(predicted / measured - 1.0).mean()),
    )  # fmt: skip


def _works(sql: Query, run: str) -> dict[int, dict[int, Work]]:
    frame = sql(
        "select iteration, micro_batch, arg_max(tokens, attempt), arg_max(sum_sq, attempt) from micro_batches "
        "where run = ? group by all",
        [run],
    )
    works: dict[int, dict[int, Work]] = {}
    for iteration, micro_batch, tokens, sum_sq in frame.iter_rows():
        works.setdefault(int(iteration), {})[int(micro_batch)] = Work(int(tokens), int(sum_sq))
    return works


def _speeds(verdicts: list[tuple[Any, ...]], iteration: int) -> Mapping[int, Mapping[str, float]]:
    speeds: dict[int, Mapping[str, float]] = {}
    for culprits, speed, since, until in verdicts:
        if since <= iteration and (until is None or iteration < until):
            speeds |= {party["rank"]: _data(speed) for party in _data(culprits) if party.get("rank") is not None}
    return {rank: speed for rank, speed in speeds.items() if speed}


def _data(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
