"""The one table behind everything: a row per line of the log, the same in the database, the sealed files and a reader's memory.

The span's fields are columns, because spans are nine rows in ten; other events are read from `payload`, the line as written. A
span has no `payload` when its columns give back the line to the byte (`LINE`), as they do for every span that we wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from unskew.collector.events import Span, tag_of
from unskew.collector.files.tail import SpoolLines

_T = TypeVar("_T")

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


def _line_of_columns(end: str = "'}'") -> str:
    """SQL: the line of a span as its writer encodes it, from its columns; not the line of one with characters to escape."""
    names = [field.encode_name for field in msgspec.structs.fields(Span) if field.encode_name in FROM_LINE]
    envelope = f"""'{{"seq":', seq, ',"at_us":', at_us, ',"type":"{tag_of(Span)}"'"""
    return f"concat({envelope}, {', '.join(map(_member, names))}, {end})"


def _member(name: str) -> str:
    """SQL: a field as a line has it, in pieces; NULL, which `concat` leaves out, when there is none.

    `||` within each took a third longer: it makes a text of its own.
    """
    quote = '"' if FROM_LINE[name] == "VARCHAR" else ""
    pieces = [f"""case when "{name}" is not null then ',"{name}":{quote}' end""", f'"{name}"']
    return ", ".join([*pieces, *([f"""case when "{name}" is not null then '{quote}' end"""] if quote else [])])


LINE = _line_of_columns()
PAYLOAD = f"case when payload is null and type = '{tag_of(Span)}' then {LINE} else payload end"
"""SQL over a row of the log: the line as written."""

_EVENT = r'^\{"seq":[0-9]{1,18},"at_us":[0-9]{1,18},'
"""How every line of ours begins."""
DUE_OF_WRITER = "max(seq) + 1 - case when contains(writer, '@') then min(seq) else 0 end"
"""How many rows a writer's are if none is missing: telemetry counts from 0; a control stream passes from writer to writer."""
_VALID = " and json_valid(payload)"
BATCH_BYTES = 4 * 1024 * 1024
"""Lines come to DuckDB in pieces of about this size, so that several threads can share in them."""


def quoted(text: str) -> str:
    """`text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def create_table(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
    connection.execute(f"create table if not exists {table} ({columns})").fetchall()


def insert(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    run: str,
    found: Sequence[SpoolLines],
    first_pos: int | None = None,
) -> int:
    """Append a row per line that is an event's, and return how many. Positions count the lines up from `first_pos`."""
    if not found:
        return 0

    def append(source: str) -> int:
        ((count,),) = connection.execute(f"insert into {table} by name {source}").fetchall()
        return int(count)

    return from_lines(connection, run, found, first_pos, append)


class Arriving:
    """Appends rows for lines of which a few come many times a second: by a statement that is planned once.

    Planning takes as long as a thousand lines. The statement reads from this object, which hands out the latest lines. Spans
    keep their line, as these rows are here for a while: comparing it with what the columns give back takes a third of the time.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, table: str) -> None:
        self._table, self._latest = table, _arrived((), None)
        connection.register("arriving", self)
        rows = _rows("$run", "arriving", compact=False)
        connection.execute(f"prepare arrive as insert into {table} by name {rows}").fetchall()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Arrow's protocol for what can be read."""
        return self._latest.__arrow_c_stream__(requested_schema)

    def insert(self, connection: duckdb.DuckDBPyConnection, run: str, found: Sequence[SpoolLines]) -> None:
        """As the function `insert`; `connection`, which holds this object, is the one it was made for."""
        from duckdb import InvalidInputException  # noqa: PLC0415

        self._latest = _arrived(found, None)
        try:
            connection.execute(f"execute arrive(run := {quoted(run)})").fetchall()
        except InvalidInputException:  # a line is no JSON
            insert(connection, self._table, run, found)
        finally:
            self._latest = _arrived((), None)


def from_lines(
    connection: duckdb.DuckDBPyConnection,
    run: str,
    found: Sequence[SpoolLines],
    first_pos: int | None,
    use: Callable[[str], _T],
) -> _T:
    """What `use` makes of the rows of these lines, which it is given as a SELECT and asks for once."""
    from duckdb import InvalidInputException  # noqa: PLC0415 - who has a connection has loaded it, others need not

    connection.register("arrived", _arrived(found, first_pos))
    try:
        try:
            return use(_rows(quoted(run), "arrived"))
        except InvalidInputException:  # a line is no JSON: seldom, so it is looked for only then
            return use(_rows(quoted(run), "arrived", _VALID))
    finally:
        connection.unregister("arrived")


def _rows(run: str, source: str, valid: str = "", *, compact: bool = True) -> str:
    rows = f"""
        select pos, {run}::varchar as run, writer, segment, unnest(json_transform(payload, '{json.dumps(FROM_LINE)}')), payload
        from {source} where regexp_matches(payload, '{_EVENT}'){valid}"""
    line = "replace(payload, chr(10), '')"
    if compact:
        whole = _line_of_columns("'}', chr(10)")
        line = f"case when payload = {whole} then null else {line} end"
    return f"select * replace ({line} as payload) from ({rows})"


def _arrived(found: Sequence[SpoolLines], first_pos: int | None) -> Any:
    """The lines as an Arrow table: pos, writer, segment, payload with its newline: to leave that out costs a copy."""
    import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types  # noqa: PLC0415 - 0.1 s that idle readers save

    batches, pos = [], first_pos
    for group in _groups(found):
        batches.append(_batch(group, pos))
        pos = None if pos is None else pos + batches[-1].num_rows
    return pa.Table.from_batches(batches)


def _groups(found: Sequence[SpoolLines]) -> Iterator[list[SpoolLines]]:
    """`found` in pieces of about BATCH_BYTES."""
    group, size = list[SpoolLines](), 0
    for lines in found:
        if group and size + len(lines.data) > BATCH_BYTES:
            yield group
            group, size = [], 0
        group.append(lines)
        size += len(lines.data)
    yield group


def _batch(found: Sequence[SpoolLines], first_pos: int | None) -> Any:
    """An Arrow record batch of these lines.

    Made of buffers: a Python object per line costs more than its JSON, and `pa.array` of a list loads pandas (0.2 s, 40 MB).
    """
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    def integers(values: Any) -> Any:
        return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values.astype(np.int64))])

    def texts(data: bytes, ends: Any) -> Any:
        offsets = pa.py_buffer(np.concatenate(([0], ends)).astype(np.int32))
        return pa.StringArray.from_buffers(len(ends), offsets, pa.py_buffer(data))

    def ends_of(data: bytes) -> Any:
        return np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1

    data = b"".join(lines.data for lines in found)
    ends = ends_of(data)
    counts = np.diff(np.searchsorted(ends, np.cumsum([0, *(len(lines.data) for lines in found)]), side="right"))
    if not data.isascii():
        data = data.decode(errors="replace").encode()
        ends = ends_of(data)
    number = np.arange(len(ends))
    writers = b"".join(lines.writer.encode() * count for lines, count in zip(found, counts, strict=True))
    columns = {
        "pos": pa.nulls(len(number), pa.int64()) if first_pos is None else integers(number + first_pos),
        "writer": texts(writers, np.cumsum(np.repeat([len(lines.writer.encode()) for lines in found], counts))),
        "segment": integers(np.repeat([lines.segment for lines in found], counts)),
        "payload": texts(data, ends),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
