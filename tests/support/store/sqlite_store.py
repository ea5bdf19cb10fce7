"""The event log in plain SQLite, in the two ways in which others keep theirs: a column per field, or a JSON payload per row.

Beside it our figures are given; it passes the same contract (store_contract.py), so the comparison is of equals.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from time import time_ns
from typing import Literal

import msgspec

from unskew.collector.events import Control, Span, Telemetry, tag_of
from unskew.collector.write.control_stream import VersionConflict

Form = Literal["columns", "json"]
SPAN_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Span))
_encode = msgspec.json.Encoder().encode


class SqliteStore:
    """One file, write-ahead log, a transaction per batch; `synchronous` as SQLite advises with WAL (normal)."""

    def __init__(self, path: Path, form: Form = "columns") -> None:
        self._form = form
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30.0)
        if self._connection.execute("pragma journal_mode").fetchone() != ("wal",):
            self._connection.execute("pragma journal_mode = wal")  # does not wait for other connections: it fails
        self._connection.execute("pragma synchronous = normal")
        own = "".join(f', "{name}"' for name in SPAN_FIELDS) if form == "columns" else ""
        self._connection.execute(
            f"create table if not exists events (writer text, seq integer, at_us integer, type text{own}, payload text, "
            "primary key (writer, seq)) without rowid"
        )
        self._connection.execute(
            "create table if not exists control (stream text, version integer, at_us integer, actor text, payload text, "
            "primary key (stream, version)) without rowid"
        )

    def write(self, writer: str, first_seq: int, batch: Sequence[tuple[int, Telemetry]]) -> None:
        """(at_us, event) pairs as `writer`'s events from `first_seq` on; those that are there already stay as they are."""
        rows = [self._row(writer, first_seq + number, at_us, event) for number, (at_us, event) in enumerate(batch)]
        if not rows:
            return
        places = ", ".join("?" * len(rows[0]))
        self._connection.execute("begin immediate")
        self._connection.executemany(f"insert or ignore into events values ({places})", rows)
        self._connection.execute("commit")

    def append(self, stream: str, expected_version: int, events: Sequence[Control], *, actor: str) -> int:
        """All of `events` or none, behind `expected_version`; raises `VersionConflict` when the stream is elsewhere."""
        self._connection.execute("begin immediate")
        try:
            version = self.version(stream)
            if version != expected_version:
                raise VersionConflict(f"stream {stream} is at version {version}, not {expected_version}")
            rows = [
                (stream, number, time_ns() // 1000, actor, _encode(event).decode())
                for number, event in enumerate(events, start=version + 1)
            ]
            self._connection.executemany("insert into control values (?, ?, ?, ?, ?)", rows)
            self._connection.execute("commit")
        except BaseException:
            self._connection.execute("rollback")
            raise
        return version + len(events)

    def version(self, stream: str) -> int:
        (version,) = self._connection.execute(
            "select coalesce(max(version), 0) from control where stream = ?", (stream,)
        ).fetchone()
        return int(version)

    def query(self, sql: str) -> list[tuple[object, ...]]:
        return self._connection.execute(sql).fetchall()

    def close(self) -> None:
        self._connection.execute("pragma wal_checkpoint(truncate)")
        self._connection.close()

    def _row(self, writer: str, seq: int, at_us: int, event: Telemetry) -> tuple[object, ...]:
        envelope = (writer, seq, at_us, tag_of(type(event)))
        if self._form == "json":
            return (*envelope, _encode(event))
        if isinstance(event, Span):
            return (*envelope, *msgspec.structs.astuple(event), None)
        return (*envelope, *(None,) * len(SPAN_FIELDS), _encode(event))
