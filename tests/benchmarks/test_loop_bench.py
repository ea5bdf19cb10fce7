"""The loop's benchmark measures what it says: one real case of kills, and the arithmetic of the others on made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.training.made_up import committed
from support.training.runtime_runs import SMALL

from unskew.analytics.core.faults import parse_faults
from unskew.benchmarks.loop import kills, overhead, slow
from unskew.benchmarks.report import Figure, bars
from unskew.benchmarks.runs import Bench, FinishedRun, Watch, perform
from unskew.collector.events import Event, Party, PlanScored, RunFinished, Verdict
from unskew.collector.paths import Store
from unskew.runtime.control.summary import SummaryBuilder
from unskew.runtime.options import RunOptions

pytestmark = pytest.mark.slow


class MadeUp(Bench):
    """Runs nothing: in every run the slow rank is named five iterations later, and the plan is predicted `off` too short."""

    def __init__(self, tmp_path: Path, off: float, named: int | None = None) -> None:
        with bars() as progress:
            super().__init__(progress, Store(tmp_path))
        self.off, self.named = off, named
        self.asked: list[RunOptions] = []

    def run(self, options: RunOptions, *faults: str, watch: Watch | None = None, settle: bool = False) -> FinishedRun:
        assert (watch, settle) == (None, False)
        parsed = parse_faults(faults, ranks=options.ranks, iterations=options.iterations)
        self.asked.append(msgspec.structs.replace(options, faults=parsed))
        rank, at = parsed[0].rank if self.named is None else self.named, parsed[0].at_iteration
        verdict = Verdict(
            verdict=1, cause="slow_device", culprits=(Party(kind="device", rank=rank),), since_iteration=at,
            at_iteration=at + 4, confidence=1.0, sentence="slow", evidence={}, config="",
        )  # fmt: skip
        scored = PlanScored(
            plan_version=1, proposal="p", from_iteration=40, to_iteration=60, n=20, measured_s=1.0, predicted_s=1 - self.off
        )
        end = RunFinished(status="done", iterations=options.iterations)
        return FinishedRun(
            options=self.asked[-1], summary=SummaryBuilder().summary("r", "d", 0, None, end), events=[verdict, scored, end],
            same_process=frozenset(), not_once=0, lost=0, doubled=0,
        )  # fmt: skip


@pytest.mark.parametrize(("off", "named", "met"), [(0.04, None, True), (0.06, None, False), (0.04, 1, False)])
def test_slow_ranks_on_real_cores_have_the_rows_of_sleeping_ones(
    off: float, named: int | None, met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "cores", lambda: 2)
    bench = MadeUp(tmp_path, off, named)
    rows = {row.name: row for row in slow.figures_on_cores(bench, seeds=range(2), factors=(2.0,))}
    assert all(row.ok for row in rows.values() if row.value is not None) is met
    assert {one.device for one in bench.asked} == {"real"}
    asked = [(one.pp, one.dp, one.faults[0].rank) for one in bench.asked]
    assert asked == [(pp, dp, rank) for pp, dp in ((2, 1), (1, 2), (2, 2)) for rank in (0, 1)]
    error = "predicted against measured iteration time after the change, median error"
    assert rows[f"slow x2, real cores, DP2: {error}"].value == pytest.approx(100 * off)
    assert rows[f"slow x2, real cores, PP2 x DP2: {error}"].note.startswith("2 plans in 2 runs on 2 cores")
    again = [*slow.figures_on_cores(bench, seeds=range(2), factors=(2.0,))]
    assert again == [*rows.values()], "a bench that was interrupted has the rows of the runs that it made"
    assert len(bench.asked) == len(asked)


@pytest.mark.limit(120)
@pytest.mark.usefixtures("forked")
def test_one_kill_is_measured_and_a_broken_part_costs_nothing_else(tmp_path: Path) -> None:
    def broken(_: Bench) -> list[Figure]:
        raise RuntimeError("no luck")

    def killed(bench: Bench) -> list[Figure]:
        return kills.figures(bench, cases=[(2, "any moment")], single=[], options=msgspec.structs.replace(SMALL, iterations=18))

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
    differences, off_us = overhead.paired(run)
    assert len(differences) == 100
    assert off_us == pytest.approx(107_050, rel=0.01)
    low, high = overhead.interval(differences)
    assert 0.0185 < low <= high < 0.0205
