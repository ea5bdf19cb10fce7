"""The one table behind everything: a row per line of the log, the same in the database, the sealed files and a reader's memory.

The span's fields are columns, because spans are nine rows in ten; other events are read from `payload`, the line as written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unskew.collector.tail import Entry

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

_SELECT = f"""
select pos, ? as run, writer, segment, unnest(json_transform(payload, '{json.dumps(FROM_LINE)}')), payload
from (select unnest(?::bigint[]) as pos, unnest(?::varchar[]) as writer, unnest(?::bigint[]) as segment,
      unnest(?::varchar[]) as payload)
"""


def quoted(text: str) -> str:
    """`text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def create_table(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
    connection.execute(f"create table if not exists {table} ({columns})").fetchall()


def insert(
    connection: duckdb.DuckDBPyConnection, table: str, run: str, entries: Sequence[Entry], first_pos: int | None = None
) -> None:
    """Append a row per entry; positions count up from `first_pos`."""
    if not entries:
        return
    positions = [None] * len(entries) if first_pos is None else list(range(first_pos, first_pos + len(entries)))
    connection.execute(
        f"insert into {table} by name {_SELECT}",
        [
            run,
            positions,
            [entry.writer for entry in entries],
            [entry.segment for entry in entries],
            [entry.raw.decode(errors="replace") for entry in entries],
        ],
    ).fetchall()
