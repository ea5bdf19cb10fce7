"""Every figure of the detectors: methods side by side, real series, real data, culprits at scale."""

from __future__ import annotations

from pathlib import Path

from unskew.benchmarks import detector_culprits, detector_data, detector_methods, detector_series
from unskew.benchmarks.report import Figure
from unskew.benchmarks.runs import Bench, perform
from unskew.collector.paths import Store


def _culprits(bench: Bench) -> list[Figure]:  # noqa: ARG001 - keeps no run
    return detector_culprits.figures()


PARTS = (detector_methods.figures, detector_series.figures, _culprits, detector_data.figures)


def main(json_path: Path | None, store: Store) -> None:
    perform("detector", PARTS, json_path, store)
