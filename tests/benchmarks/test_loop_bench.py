"""The loop's benchmark measures what it says: one real case of kills, and the arithmetic of the others on made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import SMALL

from unskew.benchmarks.loop import kills, overhead
from unskew.benchmarks.report import Figure
from unskew.benchmarks.runs import Bench, FinishedRun, perform
from unskew.collector.events import Event, IterationCommitted, RunFinished
from unskew.collector.paths import Store
from unskew.runtime.control.summary import SummaryBuilder
from unskew.runtime.options import RunOptions

pytestmark = pytest.mark.slow


def committed(iteration: int, wall_us: int) -> IterationCommitted:
    return IterationCommitted(
        iteration=iteration,
        plan_version=0,
        attempt=0,
        rank=0,
        loss=1.0,
        tokens=1,
        start_us=0,
        wall_us=wall_us,
        log_complete=True,
    )


@pytest.mark.limit(120)
@pytest.mark.usefixtures("forked")
def test_one_kill_is_measured_and_a_broken_part_costs_nothing_else(tmp_path: Path) -> None:
    def broken(_: Bench) -> list[Figure]:
        raise RuntimeError("no luck")

    def killed(bench: Bench) -> list[Figure]:
        return kills.figures(bench, cases=[(2, "any moment")], single=[], options=msgspec.structs.replace(SMALL, iterations=40))

    perform("tiny", [broken, killed], tmp_path / "tiny.json", Store(tmp_path / "store"))
    lost, *figures = json.loads((tmp_path / "tiny.json").read_text())["figures"]
    assert (lost["value"], lost["note"]) == (None, "broke: RuntimeError: no luck")
    values = {entry["name"].removeprefix("kill: "): entry["value"] for entry in figures}
    assert values["runs that trained on to the end"] == 1
    assert values["largest difference of any iteration's loss, float64"] <= 1e-8
    assert values["runs in which a survivor is not the process it was"] == 0
    assert values["(layer, micro-batch, F or B) not executed exactly once per committed iteration"] == 0
    assert 0 < values["from the death until all survivors have regrouped, median"] < 10


def test_the_overhead_is_the_difference_within_pairs() -> None:
    """Every iteration 2 % longer with instruments, the machine slower and slower, and a burst in one iteration."""
    events: list[Event] = []
    for iteration in range(2 * (overhead.SKIPPED_PAIRS + 100)):
        us = 100_000 + 50 * iteration
        us += us // 50 if iteration % 2 == 0 else 0
        events.append(committed(iteration, us * 3 if iteration == 91 else us))
    events.append(RunFinished(status="done", iterations=len(events)))
    summary = SummaryBuilder().summary("r", "real", 0, None, RunFinished(status="done", iterations=len(events)))
    run = FinishedRun(
        options=RunOptions(), summary=summary, events=events, same_process=frozenset(), not_once=0, lost=0, doubled=0
    )  # fmt: skip
    differences, off_us = overhead._paired(run)
    assert len(differences) == 100
    assert off_us == pytest.approx(107_050, rel=0.01)
    low, high = overhead._interval(differences)
    assert 0.0185 < low <= high < 0.0205
