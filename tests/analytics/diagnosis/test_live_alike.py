"""While a run goes on its screens say what `unskew diagnose` says of it at that moment, or less: never are they calmer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from support.traces.foreign_traces import frame_of
from support.traces.pipeline_spans import logged

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.outcome import Outcome, outcome_of_run
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose
from unskew.analytics.diagnosis.failslow import rehearsal_of
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.model import from_spans
from unskew.analytics.loop.intake import Intake
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.collector.events import (
    CHUNK_KINDS,
    Control,
    Event,
    IterationCommitted,
    MicroBatchPacked,
    PlanApplied,
    Regrouped,
    RunStarted,
    Span,
)
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

DEMO = Path(__file__).parents[3] / "data" / "demo"
PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)
STARTED = RunStarted(
    run="made-up", device="sleeping", clock="monotonic", mode="observe", ranks=4, options={}, code="", version="0",
    device_kind="sleep",
)  # fmt: skip
TOKEN_US, END_US, ITERATIONS = {"F": 20.0, "B": 40.0}, 3_000, 64
Chunks = Callable[[int, Span], Span]
Late = Callable[[int, int], float]


def never(_iteration: int, _rank: int) -> float:
    return 0.0


def run(
    *, late_us: Late = never, word: Chunks = lambda _iteration, span: span, end_us: int = END_US, slow: float = 1.0
) -> RunLog:
    """Healthy sleeping devices, micro-batches of a hundred tokens or so. Each chunk begins `late_us` after it could and is
    logged by `word`; an iteration ends `end_us` after its last one. Rank 1 is `slow` from iteration 24 to 40."""
    random, schedule = np.random.default_rng(11), build_schedule(PLAN)
    spans, beside, commits, begin_us = list[Span](), list[Event](), list[IterationCommitted](), 0
    for iteration in range(ITERATIONS):
        lengths = [tuple(int(n) for n in random.integers(45, 55, 2)) for _ in PLAN.routes]
        us = [
            TOKEN_US[action.kind] * action.n_layers * sum(lengths[action.micro_batch]) * float(random.lognormal(0, 0.005))
            * (slow if action.rank == 1 and 24 <= iteration < 40 else 1.0)
            for action in schedule.order
        ]  # fmt: skip
        waits = [late_us(iteration, action.rank) for action in schedule.order]
        timeline = evaluate(schedule, np.array(us) + np.array(waits), 200.0)
        after = {(a.kind, a.rank, a.micro_batch): round(wait) for a, wait in zip(schedule.order, waits, strict=True)}
        for span in logged(timeline, 200.0, iteration, begin_us):
            wait = after.get((span.kind, span.rank, span.micro_batch), 0)
            moved = msgspec.structs.replace(span, start_us=span.start_us + wait, wall_us=span.wall_us - wait)
            chunk = span.kind in CHUNK_KINDS
            spans.append(word(iteration, msgspec.structs.replace(moved, compute_us=moved.wall_us)) if chunk else span)
        wall_us = round(float(timeline.makespan_us)) + end_us
        beside += [
            MicroBatchPacked(iteration=iteration, micro_batch=number, attempt=0, lengths=of)
            for number, of in enumerate(lengths)
        ]
        commits += [
            IterationCommitted(
                iteration=iteration, plan_version=0, attempt=0, rank=rank, loss=1.0, tokens=800, start_us=begin_us,
                wall_us=wall_us, log_complete=True,
            )
            for rank in PLAN.ranks
        ]  # fmt: skip
        begin_us += wall_us
    intake, plans = Intake(), {0: PLAN}
    released = [one for _ in range(30) for one in intake.take([*spans, *beside, *commits] if not _ else (), plans)]
    steps = pl.DataFrame(
        [(0, one.iteration, one.start_us, one.wall_us) for one in commits],
        schema=dict.fromkeys(("plan_version", "iteration", "start_us", "wall_us"), pl.Int64),
        orient="row",
    )
    applied = PlanApplied(
        plan_version=0, digest=PLAN.digest, proposal="", iteration=0, reason="first", plan=PLAN.to_data(), watermark=0
    )
    return RunLog(
        run="made-up",
        device_kind="sleep",
        clock="monotonic",
        options={},
        ranks=4,
        iterations=pl.DataFrame({"iteration": range(ITERATIONS), "iteration_us": [c.wall_us for c in commits if c.rank == 0]}),
        trace=from_spans(frame_of(spans), steps, plans),
        plans=plans,
        released=tuple(released),
        control=(STARTED, applied, Regrouped(plan_version=0, iteration=0, seconds=0.0, migrate_seconds=0.0, moved_bytes=0)),
    )


def cut(log: RunLog, last: int) -> RunLog:
    """What its log holds when iteration `last` has been judged."""
    past = pl.col("iteration") <= last
    trace = msgspec.structs.replace(
        log.trace, operations=log.trace.operations.filter(past), iterations=log.trace.iterations.filter(past)
    )
    return msgspec.structs.replace(
        log,
        trace=trace,
        iterations=log.iterations.filter(past),
        released=tuple(one for one in log.released if one.committed.iteration <= last),
        control=tuple(event for event in log.control if _at(event) <= last),
        end="running",
        gap="",
    )


def _at(event: Control) -> int:
    """When it came, in iterations; of what does not say so before all of them."""
    places = (getattr(event, name, None) for name in ("at_iteration", "watermark", "iteration"))
    return next((place for place in places if place is not None), -1)


def both(log: RunLog) -> tuple[Outcome, Diagnosis]:
    """What the screens say while it goes on, by the controller's rules, and its diagnosis."""
    rehearsal = rehearsal_of(log)
    rehearsal.run()
    given: Iterable[Event] = (one for one in log.control if isinstance(one, RunStarted | PlanApplied))
    live = reduce(fold, [*given, *rehearsal.made], RunState())
    return outcome_of_run(live, controlled=True), diagnose(log)


def outcomes(log: RunLog, cuts: Sequence[int] = (10, 16, 24, 32, 48, ITERATIONS - 1)) -> list[tuple[str, str]]:
    """(live, by the diagnosis) at each cut; the live one is the same or says less."""
    found = []
    for last in cuts:
        live, diagnosed = both(cut(log, last))
        assert live.outcome in {diagnosed.outcome, "cannot_be_judged"}, (last, live.sentence, diagnosed.sentence)
        found.append((live.outcome, diagnosed.outcome))
    return found


def without_core(share: float) -> Chunks:
    """The rank's process had no core for this share of each of its chunks, in which the device went on."""
    return lambda _iteration, span: msgspec.structs.replace(span, runq_us=round(share * span.wall_us))


def test_a_healthy_run_is_well_by_both_once_it_is_known() -> None:
    assert outcomes(run())[-4:] == [("well", "well")] * 4


def test_a_slowdown_is_wrong_while_it_lasts_and_then_said_by_both() -> None:
    log = run(slow=1.8)
    assert outcomes(log, (32, 60)) == [("wrong", "wrong"), ("well", "well")]
    live, diagnosed = both(cut(log, 60))
    assert all("1 verdict before, no longer open" in one.why for one in (live, diagnosed))
    assert diagnose(log).outcome == "wrong", "of a run that is over all that was wrong counts"


@pytest.mark.parametrize("share", [0.08, 0.15, 0.25])
def test_time_behind_all_chunks_that_nobody_explains_is_no_calm(share: float) -> None:
    """Of each iteration from the first on, so that none takes longer than those before."""
    usual_us = int(both_us(run()))
    assert {*outcomes(run(end_us=round(usual_us * share / (1 - share))))} == {("cannot_be_judged", "cannot_be_judged")}


def both_us(log: RunLog) -> float:
    return float(log.iterations["iteration_us"].median() or 0.0)  # type: ignore[arg-type]  # of a number


@pytest.mark.parametrize(("share", "calm"), [(0.0, False), (0.3, True)])
def test_what_begins_late_has_a_cause_as_far_as_its_rank_had_no_core(share: float, calm: bool) -> None:
    """Every chunk begins 400 us late. On another rank, or in no chunk before, a lack of cores explains nothing."""
    late: Late = lambda _iteration, _rank: 400.0  # noqa: E731
    found = outcomes(run(late_us=late, word=without_core(share)))
    assert found[-1] == (("well", "well") if calm else ("cannot_be_judged", "cannot_be_judged"))


def test_a_core_that_ranks_lacked_explains_nothing_that_was_not_late_for_it() -> None:
    """Emulated devices go on meanwhile: most of such time costs nothing, whatever else an iteration is longer by."""
    usual_us = both_us(run())
    log = run(end_us=round(0.15 * usual_us), word=without_core(0.3))
    assert {*outcomes(log)} == {("cannot_be_judged", "cannot_be_judged")}


def test_the_recorded_run_is_called_the_same_at_every_moment(tmp_path: Path) -> None:
    store = shutil.copytree(DEMO, tmp_path / "store")
    with open_store(Store(store)) as reader:
        log = load_run(reader, reader.sql("select run from runs")["run"][0])
    found = outcomes(log, range(9, len(log.released), 20))
    assert {diagnosed for _, diagnosed in found} >= {"cannot_be_judged", "wrong"}
