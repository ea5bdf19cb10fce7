"""The bench of searched plans holds what it measures to its bars, from both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest
from support.training.made_up import committed

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.faults import parse_faults
from unskew.analytics.pipeline.prediction import model_for, predict_iterations
from unskew.benchmarks.runs import Bench, FinishedRun
from unskew.benchmarks.scheduler import searched
from unskew.collector.events import (
    Event,
    IterationJudged,
    MicroBatchPacked,
    PredictorFitted,
    RunFinished,
)
from unskew.runtime.options import RunOptions

SMALL = msgspec.structs.replace(searched.SEARCHED, pp=2, layers=8, micro_batches=4)


class MadeUp:
    """Runs that take what their first plan should take, searched ones `gain` times as long, and `late` times at the end."""

    def __init__(self, gain: float = 1.0, late: float = 1.0) -> None:
        self.gain, self.late = gain, late

    def steps(self, _what: str, of: Sequence[Any]) -> Iterator[Any]:
        yield from of

    def run(self, options: RunOptions, *faults: str) -> FinishedRun:
        parsed = parse_faults(faults, ranks=options.ranks, iterations=options.iterations, schedule=options.schedule)
        options = msgspec.structs.replace(options, faults=parsed)
        cost = profile(options.profile)
        model = msgspec.to_builtins(cost)
        events: list[Event] = [
            MicroBatchPacked(iteration=i, micro_batch=m, attempt=0, lengths=(100 + 7 * i, 200 - m))
            for i in range(options.iterations)
            for m in range(options.micro_batches)
        ]
        events += [PredictorFitted(predictor=0, watermark=8, model=model, n_chunks=1, error_percent={}, trigger="first")]
        run = FinishedRun(
            options=options, summary=cast(Any, None), events=events, same_process=frozenset(), not_once=0, lost=0, doubled=0
        )
        first = options.first_plan()
        due_us = predict_iterations(first, [*searched.works_of(run).values()], model_for(cost, first.schedule)).tolist()
        for i, us in enumerate(due_us):
            slower = self.gain if options.schedule == "searched" and not faults else self.late if i >= searched.UNTIL else 1.0
            took_us = round(slower * us)
            judged = IterationJudged(iteration=i, plan_version=0, measured_us=took_us, predicted_us=round(us))
            events += [committed(i, took_us), judged]
        events.append(RunFinished(status="done", iterations=options.iterations, committed=options.iterations, reason=""))
        return run


@pytest.mark.parametrize(
    ("made_up", "met"),
    [
        (MadeUp(), (True, True)),
        (MadeUp(gain=1.04), (False, True)),
        (MadeUp(gain=0.96), (False, True)),
        (MadeUp(late=1.02), (True, False)),
        (MadeUp(late=0.98), (True, False)),
    ],
    ids=["as promised", "gains less", "gains more", "slower once healed", "faster once healed"],
)
def test_what_differs_from_its_promise_to_either_side_misses_its_bar(made_up: MadeUp, met: tuple[bool, bool]) -> None:
    assert tuple(one.ok for one in searched.figures(cast(Bench, made_up), SMALL)) == met
