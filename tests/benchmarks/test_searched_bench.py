"""The bench of searched plans holds what it measures to its bars, from both sides."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unskew.benchmarks.report import Figure, bars
from unskew.benchmarks.runs import Bench, FinishedRun
from unskew.benchmarks.scheduler import searched
from unskew.collector.events import IterationCommitted
from unskew.collector.paths import Store


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("forked")
def test_a_searched_plan_keeps_its_promise_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FinishedRun] = []
    healed_figure = searched.healed_figure

    def seen(run: FinishedRun) -> Figure:
        runs.append(run)
        return healed_figure(run)

    monkeypatch.setattr(searched, "healed_figure", seen)
    options = msgspec.structs.replace(searched.SEARCHED, device="virtual", pp=2, layers=8, iterations=20)
    monkeypatch.setattr(searched, "END", 80)
    with bars() as progress:
        gain, healed = searched.figures(Bench(progress, Store(tmp_path)), options)
    assert gain.ok, gain
    assert healed.ok, healed
    (run,) = runs
    for factor in (0.97, 1.03):
        changed = [
            msgspec.structs.replace(event, wall_us=round(factor * event.wall_us))
            if isinstance(event, IterationCommitted) and event.iteration >= searched.UNTIL
            else event
            for event in run.events
        ]
        assert healed_figure(msgspec.structs.replace(run, events=changed)).ok is False
