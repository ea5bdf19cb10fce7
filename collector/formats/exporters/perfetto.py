"""A run as a Chrome trace (JSON), for ui.perfetto.dev: a process per rank, a thread per kind of work, arrows for messages.

Times are the run's clock. Where iterations of an imported trace each begin at zero, they are laid one after another. A send
lasts until its iteration ends on its sender; it is drawn up to the rank's next send, as bars of a thread may not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import polars

from unskew.collector.events import CHUNK_NAMES
from unskew.collector.formats.imported import FormatError
from unskew.collector.read.reader import Reader

_THREADS = {
    "F": "compute", "B": "compute", "W": "compute", "recv": "receiving", "send": "sending", "all_reduce": "collectives",
    "reduce_scatter": "collectives", "all_gather": "collectives",
}  # fmt: skip
_ORDER = ("compute", "receiving", "sending", "collectives", "other")
_SPANS = """
    select rank, kind, iteration, plan_version as epoch, attempt, micro_batch, start_us, wall_us, peer, bytes, "group"
    from spans where run = ? order by start_us, rank, seq
"""
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
    spans, recorded = reader.sql(_SPANS, [run]), reader.sql(_RECORDED, [run])
    if spans.is_empty() and recorded.is_empty():
        raise FormatError(f"run {run} has no spans to show")
    tracks = sorted(set(recorded["track"].to_list()))
    yield from _names(spans, recorded, tracks)
    spans = _in_a_row(spans)
    yield from _work(spans)
    yield from _arrows(spans)
    for row in recorded.iter_rows(named=True):
        yield {
            "ph": "i" if row["wall_us"] is None else "X",
            "name": row["name"],
            "cat": row["category"],
            "pid": row["rank"],
            "tid": len(_ORDER) + tracks.index(row["track"]),
            "ts": row["start_us"],
            **({"s": "t"} if row["wall_us"] is None else {"dur": row["wall_us"]}),
            "args": {"iteration": row["iteration"]},
        }
    yield from _decisions(reader, run, spans)


def _names(spans: polars.DataFrame, recorded: polars.DataFrame, tracks: list[str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({*spans["rank"].to_list(), *recorded["rank"].to_list()}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in enumerate((*_ORDER, *(f"source {track}".strip() for track in tracks))):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _in_a_row(spans: polars.DataFrame) -> polars.DataFrame:
    """The spans; laid one iteration after the other where each begins anew."""
    if spans.is_empty():
        return spans
    iterations = (
        spans.group_by("iteration")
        .agg(begin=polars.col("start_us").min(), end=(polars.col("start_us") + polars.col("wall_us")).max())
        .sort("iteration")
    )
    begins = iterations["begin"].to_list()
    if begins == sorted(set(begins)):
        return spans
    shift = [0, *accumulate(iterations["end"].to_list())][:-1]
    laid = iterations.select("iteration", shift=polars.Series(shift))
    return spans.join(laid, on="iteration").with_columns(start_us=polars.col("start_us") + polars.col("shift"))


def _work(spans: polars.DataFrame) -> Iterator[dict[str, Any]]:
    following = polars.col("start_us").shift(-1).over("rank", "kind", order_by="start_us") - polars.col("start_us")
    sends = polars.col("kind") == "send"
    drawn = spans.with_columns(
        drawn_us=polars.when(sends).then(polars.min_horizontal("wall_us", following)).otherwise(polars.col("wall_us"))
    )
    arguments = ("iteration", "epoch", "attempt", "micro_batch", "peer", "bytes", "group", "wall_us")
    for row in drawn.iter_rows(named=True):
        number = "" if row["micro_batch"] is None else f" {row['micro_batch']}"
        yield {
            "ph": "X",
            "name": CHUNK_NAMES.get(row["kind"], row["kind"]) + number,
            "cat": row["kind"],
            "pid": row["rank"],
            "tid": _ORDER.index(_THREADS.get(row["kind"], "other")),
            "ts": row["start_us"],
            "dur": row["drawn_us"],
            "args": {name: row[name] for name in arguments if row[name] is not None},
        }


def _arrows(spans: polars.DataFrame) -> Iterator[dict[str, Any]]:
    """From each send to the receive of the same micro-batch on the other side; the n-th to the n-th."""
    of = ["iteration", "epoch", "attempt", "micro_batch", "sender", "receiver"]
    sides = []
    for kind, sender, receiver in (("send", "rank", "peer"), ("recv", "peer", "rank")):
        side = spans.filter(
            (polars.col("kind") == kind) & polars.col("peer").is_not_null() & polars.col("micro_batch").is_not_null()
        )
        side = side.with_columns(sender=polars.col(sender), receiver=polars.col(receiver))
        sides.append(side.with_columns(nth=polars.int_range(polars.len()).over(of)))
    pairs = sides[0].join(sides[1], on=[*of, "nth"], suffix="_there")
    # Within the receiving bar: at its very end a viewer finds no bar there, or the next.
    end = polars.col("start_us_there") + (polars.col("wall_us_there") - 1).clip(0)
    rows = pairs.select("sender", "receiver", "start_us", end.alias("end"))
    for number, (sender, receiver, start_us, end_us) in enumerate(rows.iter_rows()):
        arrow = {"name": "message", "cat": "message", "id": number}
        yield {"ph": "s", "pid": sender, "tid": _ORDER.index("sending"), "ts": start_us, **arrow}
        yield {"ph": "f", "bp": "e", "pid": receiver, "tid": _ORDER.index("receiving"), "ts": end_us, **arrow}


def _decisions(reader: Reader, run: str, spans: polars.DataFrame) -> Iterator[dict[str, Any]]:
    """Verdicts and plans, as marks over all processes at the beginning of their iteration."""
    begin = dict(spans.group_by("iteration").agg(polars.col("start_us").min()).iter_rows())
    for query, category in ((_VERDICTS, "verdict"), (_PLANS, "plan")):
        for sentence, iteration in reader.sql(query, [run]).iter_rows():
            if iteration in begin:
                yield {"ph": "i", "s": "g", "name": sentence, "cat": category, "pid": 0, "tid": 0, "ts": begin[iteration]}
