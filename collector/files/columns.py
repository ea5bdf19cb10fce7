"""The columns of an event type, derived from its struct: a field added there appears in the views by itself."""

from __future__ import annotations

import json
import types
from typing import Any, Union, get_args, get_origin

import msgspec

from unskew.collector.events import Event
from unskew.collector.files.rows import quoted
from unskew.collector.files.upcasters import rows_of

_SQL_TYPE = {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", str: "VARCHAR"}


def _sql_type(kind: Any) -> str:
    """The SQL type of a field: plain ones as such, texts of a fixed choice as VARCHAR, everything nested as JSON."""
    if get_origin(kind) in {Union, types.UnionType}:
        return _sql_type(next(part for part in get_args(kind) if part is not type(None)))
    if kind in _SQL_TYPE:
        return _SQL_TYPE[kind]
    choices = get_args(kind)
    return "VARCHAR" if choices and all(isinstance(choice, str) for choice in choices) else "JSON"


def own_columns(event: type[Event], source: str = "log") -> str:
    """A SELECT of an event type from relation `source`: run, writer, seq, at_us, actor and the event's own fields, named as in
    its lines.

    Lines of older versions are read as the newest; a field that a line leaves out has its default.
    """
    fields = [field for field in msgspec.structs.fields(event) if field.name != "run"]
    hints = {field.encode_name: _sql_type(field.type) for field in fields}
    columns = []
    for field in fields:
        name = f'own."{field.encode_name}"'
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if default not in (None, msgspec.NODEFAULT):
            literal = quoted(default if isinstance(default, str) else json.dumps(default))
            name = f"coalesce({name}, {literal}::{hints[field.encode_name]})"
        columns.append(f'{name} as "{field.encode_name}"')
    return (
        f"select run, writer, seq, at_us, actor, {', '.join(columns)} from (select run, writer, seq, at_us, actor, "
        f"json_transform(payload, {quoted(json.dumps(hints))}) as own from ({rows_of(event, source)}))"
    )
