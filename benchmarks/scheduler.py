"""The Scheduler's figures: pipeline model, planners, planners on wrong estimates, simulator and studies. `unskew bench
NAME` runs one part alone: scheduler_pipeline, scheduler_planners, scheduler_beliefs, scheduler_studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from unskew.benchmarks import scheduler_beliefs, scheduler_pipeline, scheduler_planners, scheduler_studies
from unskew.benchmarks.growth import draw_growth
from unskew.benchmarks.report import Figure, publish, showing
from unskew.collector.paths import Store

PARTS: tuple[Callable[[], Iterable[Figure]], ...] = (
    scheduler_pipeline.figures,
    scheduler_planners.figures,
    scheduler_beliefs.figures,
    scheduler_studies.figures,
)


def main(json_path: Path | None, store: Store) -> None:  # noqa: ARG001 - keeps no run
    found = list[Figure]()
    with showing() as steps:
        for part in PARTS:
            for figures in steps(part.__module__.rpartition(".")[2], [part]):
                found += figures()
    publish("scheduler", found, json_path)
    if json_path is not None:
        print(f"growth of the planning time: {draw_growth(found, json_path)}")
