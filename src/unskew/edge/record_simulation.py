"""A simulated job, written as a run into a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from typing import Any

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.code_hash import code_hash
from unskew.analytics.lab.simulator.outcome import SimulationOutcome
from unskew.analytics.lab.simulator.run_events import control_events, finished, iterations
from unskew.collector.events import Control, RunStarted
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

_CONTROL_BATCH = 200
_TELEMETRY_BATCH = 5000


def record(
    store: Store, run: str, outcome: SimulationOutcome, cluster_events: Sequence[ClusterEvent], options: dict[str, Any]
) -> None:
    """Write the outcome as run `run`. Raises `StoreError` when the store refuses."""
    job = outcome.job
    started = RunStarted(
        run=run, device="simulated", clock="virtual", mode="auto", ranks=job.dp * job.pp, options=options, code=code_hash(),
        version=version("unskew"),
    )  # fmt: skip
    control = ControlStream(store, run, f"run/{run}", "simulator")
    telemetry = SpoolWriter(store, run, "simulator.0")
    try:
        for batch in _in_batches([started, *control_events(outcome, cluster_events)]):
            control.add(*batch)
        for number, event in enumerate(iterations(outcome)):
            telemetry.append(event)
            if number % _TELEMETRY_BATCH == 0:
                telemetry.hand_over(10.0)
        telemetry.hand_over(10.0)
        control.add(finished(outcome))
    finally:
        telemetry.close(10.0)
        control.close()


def _in_batches(events: Iterable[Control]) -> Iterator[list[Control]]:
    rest = iter(events)
    while batch := list(islice(rest, _CONTROL_BATCH)):
        yield batch
