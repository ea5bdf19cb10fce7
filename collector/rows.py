"""The one table behind everything: a row per line of the log, the same in the database, the sealed files and a reader's memory.

The span's fields are columns, because spans are nine rows in ten; other events are read from `payload`, the line as written. A
span has no `payload` when its columns give back the line to the byte (`LINE`), as they do for every span that we wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from unskew.collector.events import Span, tag_of
from unskew.collector.tail import Lines

if TYPE_CHECKING:
    import duckdb

FROM_LINE = {
    "seq": "BIGINT", "at_us": "BIGINT", "stream": "VARCHAR", "version": "BIGINT", "actor": "VARCHAR", "type": "VARCHAR",
    "iteration": "INTEGER", "rank": "INTEGER", "epoch": "INTEGER", "attempt": "INTEGER", "kind": "VARCHAR", "device": "VARCHAR",
    "micro_batch": "INTEGER", "first_layer": "INTEGER", "n_layers": "INTEGER", "group": "VARCHAR", "group_seq": "INTEGER",
    "peer": "INTEGER", "bytes": "BIGINT", "start_us": "BIGINT", "wall_us": "BIGINT", "posted_us": "BIGINT",
    "compute_us": "BIGINT", "wait_tp_us": "BIGINT", "wait_dp_us": "BIGINT", "wait_pp_us": "BIGINT", "runq_us": "BIGINT",
}  # fmt: skip
"""Columns taken from the line: name -> SQL type. Absent or of another type = NULL."""

COLUMNS = {"pos": "BIGINT", "run": "VARCHAR", "writer": "VARCHAR", "segment": "BIGINT", **FROM_LINE, "payload": "VARCHAR"}
"""`pos` is ingest order (NULL for a reader while the line lies in a spool file), `segment` the first seq of that file."""


def _line_of_columns() -> str:
    """SQL: the line of a span as its writer encodes it, from its columns; not the line of one with characters to escape."""
    names = [field.encode_name for field in msgspec.structs.fields(Span) if field.encode_name in FROM_LINE]
    envelope = f"""'{{"seq":', seq, ',"at_us":', at_us, ',"type":"{tag_of(Span)}"'"""
    return f"concat({envelope}, {', '.join(map(_member, names))}, '}}')"


def _member(name: str) -> str:
    """SQL: a field as it stands in a line; NULL, which `concat` leaves out, when there is none."""
    quote = '"' if FROM_LINE[name] == "VARCHAR" else ""
    return f"""',"{name}":{quote}' || "{name}" || '{quote}'"""


LINE = _line_of_columns()
PAYLOAD = f"case when payload is null and type = '{tag_of(Span)}' then {LINE} else payload end"
"""SQL over a row of the log: the line as written."""

_EVENT = '^\\{"seq":[0-9]{1,18},"at_us":[0-9]{1,18},'
"""How every line of ours begins."""
_SELECT = f"""
select * replace (case when payload = {LINE} then null else payload end as payload) from (
    select pos, ? as run, writer, segment, unnest(json_transform(payload, '{json.dumps(FROM_LINE)}')), payload
    from arrived where regexp_matches(payload, '{_EVENT}') and json_valid(payload))
"""


def quoted(text: str) -> str:
    """`text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def create_table(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
    connection.execute(f"create table if not exists {table} ({columns})").fetchall()


def count_lines(found: Sequence[Lines]) -> int:
    return sum(lines.data.count(b"\n") for lines in found)


def insert(
    connection: duckdb.DuckDBPyConnection, table: str, run: str, found: Sequence[Lines], first_pos: int | None = None
) -> int:
    """Append a row per line that is an event's, and return how many; positions count the lines up from `first_pos`."""
    if not found:
        return 0
    import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types  # noqa: PLC0415 - 0.1 s that idle readers save

    payloads: list[str] = []
    writers, segments = [], []
    for lines in found:
        texts = lines.data.decode(errors="replace").split("\n")
        texts.pop()
        payloads += texts
        writers.append(pa.repeat(lines.writer, len(texts)))
        segments.append(pa.repeat(lines.segment, len(texts)))
    n = len(payloads)
    arrived = pa.table(
        {
            "pos": pa.nulls(n, pa.int64()) if first_pos is None else pa.array(range(first_pos, first_pos + n), pa.int64()),
            "writer": pa.chunked_array(writers, pa.string()),
            "segment": pa.chunked_array(segments, pa.int64()),
            "payload": pa.array(payloads, pa.string()),
        }
    )
    connection.register("arrived", arrived)
    try:
        ((count,),) = connection.execute(f"insert into {table} by name {_SELECT}", [run]).fetchall()
    finally:
        connection.unregister("arrived")
    return int(count)
