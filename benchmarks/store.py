"""The event log against its bars: every figure that README and docs/reference/store.md state of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unskew.benchmarks import store_exchange, store_faults, store_ingest, store_queries
from unskew.benchmarks.report import Figure
from unskew.benchmarks.runs import Bench, Part, perform
from unskew.collector.paths import Store


def main(json_path: Path | None, store: Store) -> None:
    perform("store", PARTS, json_path, store)


def _alone(figures: Callable[..., list[Figure]]) -> Part:
    """A part that makes its own stores."""

    def part(bench: Bench) -> list[Figure]:
        return figures(steps=bench.steps)

    part.__module__ = figures.__module__  # names it when it breaks
    return part


PARTS: tuple[Part, ...] = (
    _alone(store_ingest.figures),
    _alone(store_faults.figures),
    _alone(store_queries.figures),
    store_exchange.figures,
)
