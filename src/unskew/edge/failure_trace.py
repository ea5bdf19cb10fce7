"""Files of recorded traces of losses and returns."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.lab.simulator.specs import SpecError
from unskew.analytics.lab.simulator.traces import trace_events
from unskew.edge.tables import read_table


def load_trace(path: Path, job: Job, *, hours: float) -> list[ClusterEvent]:
    """The first `hours` of a trace in CSV or Parquet. Raises `SpecError` when the file is none."""
    try:
        if not path.is_file():
            raise SpecError("there is no such file")
        return trace_events(read_table(path), job, hours=hours)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise SpecError(f"trace:{path}: cannot be read ({str(error).splitlines()[0]})") from None
    except SpecError as error:
        raise SpecError(f"trace:{path}: {error}") from None
