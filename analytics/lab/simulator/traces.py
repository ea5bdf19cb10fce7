"""Recorded traces of losses and returns -> cluster events. A trace's nodes are dealt round-robin to the job's nodes.

Two forms, recognised by their columns: `t_ms, event (add, remove), node` (spot instances) and `nodenumz, started, fixed,
system` (LANL's node outages; the system with the most records). A node that is lost twice at once is lost once.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.lab.simulator.specs import SpecError

_SPOT = {"t_ms", "event", "node"}
_LANL = {"nodenumz", "started", "fixed", "system"}


def trace_events(frame: pl.DataFrame, job: Job, *, hours: float) -> list[ClusterEvent]:
    """The first `hours` of a trace. Raises `SpecError` when the table is none."""
    columns = set(frame.columns)
    if columns >= _SPOT:
        return _dealt(job, _spot(frame), hours)
    if columns >= _LANL:
        return _dealt(job, _lanl(frame), hours)
    raise SpecError(f"needs the columns {sorted(_SPOT)} or {sorted(_LANL)}, not {sorted(columns)}")


def _spot(frame: pl.DataFrame) -> list[tuple[float, str, str]]:
    rows = [(row["t_ms"] / 1000.0, row["event"], str(row["node"])) for row in frame.sort("t_ms").iter_rows(named=True)]
    begin = next((at for at, event, _ in rows if event == "remove"), 0.0)
    return [(at - begin + 1.0, "failed" if event == "remove" else "joined", node) for at, event, node in rows if at >= begin]


def _lanl(frame: pl.DataFrame) -> list[tuple[float, str, str]]:
    busiest = frame["system"].mode().sort()[0]
    rows = frame.filter((pl.col("system") == busiest) & pl.col("fixed").is_not_null()).sort("started")
    begin = rows["started"][0]
    found = []
    for started, fixed, node in rows.select("started", "fixed", "nodenumz").iter_rows():
        found.append(((started - begin).total_seconds() + 1.0, "failed", str(node)))
        found.append(((fixed - begin).total_seconds() + 1.0, "joined", str(node)))
    return sorted(found)


def _dealt(job: Job, rows: Iterable[tuple[float, str, str]], hours: float) -> list[ClusterEvent]:
    slot: dict[str, int] = {}
    down: set[int] = set()
    found = []
    for at_s, what, node in rows:
        if at_s >= hours * 3600.0:
            break
        number = slot.setdefault(node, len(slot) % job.nodes)
        if (what == "failed") == (number in down):
            continue
        down ^= {number}
        first = number * job.gpus_per_node
        devices = tuple(range(first, min(first + job.gpus_per_node, job.devices)))
        found.append(ClusterEvent(kind="failed" if what == "failed" else "joined", at_s=at_s, devices=devices, why="trace"))
    return found
