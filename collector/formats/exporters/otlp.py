"""A run as OpenTelemetry traces, in the JSON form of OTLP: a line per iteration, each a request that a collector takes.

An iteration is a trace: its root lasts from the first rank's beginning to the last rank's end and has the verdicts and plans of
that iteration as events; below it a span per rank, and below that its work. Each rank is a resource. Times are those at which
the log was written, less the time from the end of an iteration to its line: a run's own clock says no time of day.
(opentelemetry-proto, trace.proto and "JSON Protobuf Encoding" of the OTLP specification: ids are hexadecimal, 64-bit numbers
are strings.)
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import polars

from unskew.collector.events import CHUNK_NAMES
from unskew.collector.formats.exporters.bars import bars
from unskew.collector.formats.imported import FormatError
from unskew.collector.read.reader import Reader

_WRITTEN = """
    select min(at_us - (payload->>'start_us')::bigint - (payload->>'wall_us')::bigint) as apart_us
    from events where run = ? and type like 'iteration_committed@%'
"""
_BEGUN = "select min(at_us) as at_us from events where run = ?"
_DECISIONS = """
    select at_iteration as iteration, 'verdict' as name, sentence from verdicts where run = $run
    union all select from_iteration, 'plan', 'plan ' || plan_version || ': ' || reason from plans where run = $run
    order by all
"""
_ATTRIBUTES = ("micro_batch", "attempt", "peer", "bytes", "group", "compute_us")
_INTERNAL = 1  # SPAN_KIND_INTERNAL


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the requests; returns a sentence on what is in them. Raises `FormatError` when the run has no spans."""
    spans = bars(reader, run)
    if spans.is_empty():
        raise FormatError(f"run {run} has no spans to show")
    decisions = reader.sql(_DECISIONS, {"run": run}).partition_by("iteration", as_dict=True, include_key=False)
    apart_us, traces = _apart_us(reader, run, spans), 0
    with path.open("wb") as file:
        for (iteration,), of in spans.partition_by("iteration", as_dict=True, maintain_order=True).items():
            marks = decisions.get((iteration,))
            file.write(msgspec.json.encode(_request(run, int(iteration), of, marks, apart_us)) + b"\n")
            traces += 1
    return f"{spans.height:,} spans in {traces:,} traces, an iteration each"


def _apart_us(reader: Reader, run: str, spans: polars.DataFrame) -> int:
    """Time of day less the run's clock. A run without commits begins when its first line was written."""
    (apart_us,) = reader.sql(_WRITTEN, [run]).row(0)
    if apart_us is not None:
        return int(apart_us)
    return int(reader.sql(_BEGUN, [run]).item()) - int(spans["start_us"].min() or 0)  # type: ignore[arg-type]


def _request(
    run: str, iteration: int, spans: polars.DataFrame, marks: polars.DataFrame | None, apart_us: int
) -> dict[str, Any]:
    """An ExportTraceServiceRequest: the iteration on a resource of the run, each rank's work on its own."""
    trace, ids = _hexadecimal(f"{run} {iteration}", 16), (_hexadecimal(f"{run} {iteration} {n}", 8) for n in count())
    root, begun_us, ended_us = next(ids), int(spans["start_us"].min()), int(spans["end_us"].max())  # type: ignore[arg-type]

    def span(id: str, parent: str, name: str, start_us: int, end_us: int, **more: Any) -> dict[str, Any]:
        times = {"startTimeUnixNano": _nanoseconds(start_us + apart_us), "endTimeUnixNano": _nanoseconds(end_us + apart_us)}
        above = {"parentSpanId": parent} if parent else {}
        return {"traceId": trace, "spanId": id, **above, "name": name, "kind": _INTERNAL, **times, **more}

    events = [
        {"timeUnixNano": _nanoseconds(begun_us + apart_us), "name": name, "attributes": _attributes({"sentence": sentence})}
        for name, sentence in (() if marks is None else marks.iter_rows())
    ]
    more = {"attributes": _attributes({"iteration": iteration}), "events": events}
    resources = [_resource(run, {}, [span(root, "", f"iteration {iteration}", begun_us, ended_us, **more)])]
    for (rank,), of in spans.partition_by("rank", as_dict=True, maintain_order=True).items():
        above = next(ids)
        own = [span(above, root, f"rank {rank}", int(of["start_us"].min()), int(of["end_us"].max()))]  # type: ignore[arg-type]
        for row in of.iter_rows(named=True):
            known = {name: row[name] for name in _ATTRIBUTES if row[name] is not None} | {"plan_version": row["epoch"]}
            name = CHUNK_NAMES.get(row["kind"], row["kind"])
            own.append(span(next(ids), above, name, row["start_us"], row["end_us"], attributes=_attributes(known)))
        resources.append(_resource(run, {"unskew.rank": rank}, own))
    return {"resourceSpans": resources}


def _resource(run: str, more: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    named = {"service.name": "unskew", "unskew.run": run, **more}
    return {"resource": {"attributes": _attributes(named)}, "scopeSpans": [{"scope": {"name": "unskew"}, "spans": spans}]}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}}
        for key, value in values.items()
    ]


def _nanoseconds(us: int) -> str:
    return str(1000 * us)


def _hexadecimal(of: str, size: int) -> str:
    return sha256(of.encode()).hexdigest()[: 2 * size]
