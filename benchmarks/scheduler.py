"""The Scheduler's figures, all of them: pipeline model, planners. `unskew bench NAME` runs one part alone: scheduler_pipeline,
scheduler_planners."""

from __future__ import annotations

from pathlib import Path

from unskew.benchmarks import scheduler_pipeline, scheduler_planners
from unskew.benchmarks.report import publish
from unskew.collector.paths import Store


def main(json_path: Path | None, store: Store) -> None:  # noqa: ARG001 - keeps no run
    publish("scheduler", [*scheduler_pipeline.figures(), *scheduler_planners.figures()], json_path)
