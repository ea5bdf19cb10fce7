"""A run as a Chrome trace (JSON), for ui.perfetto.dev: a process per rank, a thread per kind of work, arrows for messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars

from unskew.collector.events import CHUNK_NAMES
from unskew.collector.formats.exporters.bars import bars, lane_order
from unskew.collector.formats.imported import FormatError
from unskew.collector.read.reader import Reader

_RECORDED = """
    select rank, payload->>'name' as name, payload->>'category' as category, coalesce(payload->>'track', '') as track,
        iteration, (payload->>'start_us')::bigint as start_us, (payload->>'wall_us')::bigint as wall_us
    from events where run = ? and type = 'source_recorded@1' order by start_us
"""
_VERDICTS = "select sentence, at_iteration as iteration from verdicts where run = ?"
_PLANS = "select 'plan ' || plan_version || ': ' || reason as sentence, from_iteration as iteration from plans where run = ?"


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the trace; returns a sentence on what is in it. Raises `FormatError` when the run has no spans."""
    count = 0
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in events(reader, run):
            file.write((b",\n" if count else b"") + msgspec.json.encode(event))
            count += 1
        file.write(b"\n]}\n")
    return f"{count:,} trace events"


def events(reader: Reader, run: str) -> Iterator[dict[str, Any]]:
    """The events of the trace, names first."""
    spans, recorded = bars(reader, run), reader.sql(_RECORDED, [run])
    if spans.is_empty() and recorded.is_empty():
        raise FormatError(f"run {run} has no spans to show")
    lanes = lane_order(set(spans["lane"]))
    tracks = sorted(set(recorded["track"].to_list()))
    yield from _names(spans, recorded, [*lanes, *(f"source {track}".strip() for track in tracks)])
    for row in spans.iter_rows(named=True):
        yield _bar(row, lanes.index(row["lane"]))
    yield from _arrows(spans, lanes)
    for row in recorded.iter_rows(named=True):
        yield {
            "ph": "i" if row["wall_us"] is None else "X",
            "name": row["name"],
            "cat": row["category"],
            "pid": row["rank"],
            "tid": len(lanes) + tracks.index(row["track"]),
            "ts": row["start_us"],
            **({"s": "t"} if row["wall_us"] is None else {"dur": row["wall_us"]}),
            "args": {"iteration": row["iteration"]},
        }
    yield from _decisions(reader, run, spans)


def _names(spans: polars.DataFrame, recorded: polars.DataFrame, threads: list[str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({*spans["rank"].to_list(), *recorded["rank"].to_list()}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in enumerate(threads):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _bar(row: dict[str, Any], thread: int) -> dict[str, Any]:
    number = "" if row["micro_batch"] is None else f" {row['micro_batch']}"
    arguments = ("iteration", "epoch", "attempt", "micro_batch", "peer", "bytes", "group", "wall_us")
    return {
        "ph": "X",
        "name": CHUNK_NAMES.get(row["kind"], row["kind"]) + number,
        "cat": row["kind"],
        "pid": row["rank"],
        "tid": thread,
        "ts": row["start_us"],
        "dur": row["end_us"] - row["start_us"],
        "args": {name: row[name] for name in arguments if row[name] is not None},
    }


def _arrows(spans: polars.DataFrame, lanes: list[str]) -> Iterator[dict[str, Any]]:
    """From the beginning of each send to the end of its receive; within the bar, as a viewer finds none at its very end."""
    pairs = spans.join(spans, left_on="row", right_on="sent_row", suffix="_there", maintain_order="left")
    rows = pairs.select("rank", "lane", "start_us", "rank_there", "lane_there", polars.col("end_us_there") - 1)
    for number, (sender, sending, sent_us, receiver, receiving, end_us) in enumerate(rows.iter_rows()):
        arrow = {"name": "message", "cat": "message", "id": number}
        yield {"ph": "s", "pid": sender, "tid": lanes.index(sending), "ts": sent_us, **arrow}
        yield {"ph": "f", "bp": "e", "pid": receiver, "tid": lanes.index(receiving), "ts": end_us, **arrow}


def _decisions(reader: Reader, run: str, spans: polars.DataFrame) -> Iterator[dict[str, Any]]:
    """Verdicts and plans, as marks over all processes at the beginning of their iteration."""
    begin = dict(spans.group_by("iteration").agg(polars.col("start_us").min()).iter_rows())
    for query, category in ((_VERDICTS, "verdict"), (_PLANS, "plan")):
        for sentence, iteration in reader.sql(query, [run]).iter_rows():
            if iteration in begin:
                yield {"ph": "i", "s": "g", "name": sentence, "cat": category, "pid": 0, "tid": 0, "ts": begin[iteration]}
