"""Recorded traces of losses and returns -> cluster events. A trace's nodes are dealt round-robin to the job's nodes.

Three forms, recognised by their columns: `t_ms, event (add, remove), node` (spot instances), `timestamp, n_instances` (a pool
of them: the share of the most that it ever had is the share of the job's nodes that are there; which of them is drawn) and
`nodenumz, started, fixed, system` (LANL's node outages; the system with the most records). A node that is lost twice at once
is lost once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.lab.simulator.specs import SpecError

_SPOT = {"t_ms", "event", "node"}
_COUNTS = {"timestamp", "n_instances"}
_LANL = {"nodenumz", "started", "fixed", "system"}


def trace_events(frame: pl.DataFrame, job: Job, *, hours: float) -> list[ClusterEvent]:
    """The first `hours` of a trace. Raises `SpecError` when the table is none."""
    columns = set(frame.columns)
    if columns >= _SPOT:
        return _dealt(job, _spot(frame), hours)
    if columns >= _COUNTS:
        return _dealt(job, _counted(frame, job.nodes), hours)
    if columns >= _LANL:
        return _dealt(job, _lanl(frame), hours)
    raise SpecError(f"needs the columns {sorted(_SPOT)}, {sorted(_COUNTS)} or {sorted(_LANL)}, not {sorted(columns)}")


def _spot(frame: pl.DataFrame) -> list[tuple[float, str, str]]:
    rows = [(row["t_ms"] / 1000.0, row["event"], str(row["node"])) for row in frame.sort("t_ms").iter_rows(named=True)]
    begin = next((at for at, event, _ in rows if event == "remove"), 0.0)
    return [(at - begin + 1.0, "failed" if event == "remove" else "joined", node) for at, event, node in rows if at >= begin]


def _counted(frame: pl.DataFrame, nodes: int) -> list[tuple[float, str, str]]:
    stamp = pl.col("timestamp").str.to_datetime() if frame.schema["timestamp"] == pl.String else pl.col("timestamp")
    rows = frame.select(stamp, pl.col("n_instances").cast(pl.Int64)).drop_nulls().sort("timestamp").rows()
    most, random = max((count for _, count in rows), default=0), np.random.default_rng(0)
    there, gone, found = list(range(nodes)), list[int](), list[tuple[float, str, str]]()
    for at, count in rows:
        at_s, wanted = (at - rows[0][0]).total_seconds() + 1.0, nodes * max(count, 0) // max(most, 1)
        while len(there) != wanted:
            source, target, what = (there, gone, "failed") if len(there) > wanted else (gone, there, "joined")
            target.append(source.pop(int(random.integers(len(source)))))
            found.append((at_s, what, str(target[-1])))
    return found


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
