"""The whole loop against its bars: every figure that README states of it. `unskew bench NAME` runs one part alone: kills, slow,
healthy, overhead, outage."""

from __future__ import annotations

from pathlib import Path

from unskew.benchmarks import healthy, kills, outage, overhead, slow
from unskew.benchmarks.runs import perform
from unskew.collector.paths import Store

PARTS = (
    kills.figures,
    slow.figures_of_a_strong_fault,
    slow.figures_of_a_weak_fault,
    outage.figures,
    overhead.figures,
    healthy.figures,
)


def main(json_path: Path | None, store: Store) -> None:
    perform("loop", PARTS, json_path, store)
