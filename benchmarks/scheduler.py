"""The Scheduler's figures: pipeline model, planners, planners on wrong beliefs, simulator and studies. `unskew bench NAME` runs
one part alone: scheduler_pipeline, scheduler_planners, scheduler_beliefs, scheduler_studies."""

from __future__ import annotations

from pathlib import Path

from unskew.benchmarks import scheduler_beliefs, scheduler_pipeline, scheduler_planners, scheduler_studies
from unskew.benchmarks.report import publish
from unskew.collector.paths import Store

PARTS = (scheduler_pipeline.figures, scheduler_planners.figures, scheduler_beliefs.figures, scheduler_studies.figures)


def main(json_path: Path | None, store: Store) -> None:  # noqa: ARG001 - keeps no run
    publish("scheduler", [figure for part in PARTS for figure in part()], json_path)
