"""Lines as writers write them, one per event type with every field set: the goldens of schema evolution.

    python tests/support/store/golden_lines.py    append to golden/ a line for each type that lacks one with all its fields

A golden line is never changed or removed: somebody's log has such lines. A field with a default may join a version (append a
line); any other change of fields is a new version, with a step in collector/files/upcasters.py.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from unskew.collector.events import CONTROL, TELEMETRY, Control, Event, tag_of
from unskew.collector.files.segment import control_line, telemetry_line

FOLDER = Path(__file__).with_name("golden")
ENVELOPE = ("seq", "at_us", "stream", "version", "actor", "type")


def golden(event: type[Event]) -> Path:
    return FOLDER / f"{tag_of(event)}.jsonl"


def example(kind: Any) -> Any:
    """A value of a type that is no default, whole numbers for floats left out."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        return example(next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return parts[-1]
    if origin in {tuple, list, dict}:
        values = [example(part) for part in parts if part is not Ellipsis]
        return {"a": values[-1]} if origin is dict else origin(values)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: _other(field, hints[field.name]) for field in msgspec.structs.fields(kind)})
    return {int: 7, float: 0.25, bool: False, str: "text"}.get(kind, 3)


def _other(field: msgspec.structs.FieldInfo, kind: Any) -> Any:
    value = example(kind)
    return True if value is False and field.default is False else value


def line(event: type[Event]) -> bytes:
    one = example(event)
    if issubclass(event, Control):
        return control_line(1_700_000_000_000_000, "control", 3, "controller", one)
    return telemetry_line(3, 1_700_000_000_000_000, one)


def fields_in(lines: list[bytes]) -> set[str]:
    """The names of the event's own fields that any of the lines has."""
    return {name for one in lines for name in msgspec.json.decode(one)} - set(ENVELOPE)


def main() -> None:
    for event in (*TELEMETRY, *CONTROL):
        path = golden(event)
        lines = path.read_bytes().splitlines() if path.exists() else []
        if not {field.encode_name for field in msgspec.structs.fields(event)} <= fields_in(lines):
            with path.open("ab") as file:
                file.write(line(event))
            print(f"appended to {path.name}")


if __name__ == "__main__":
    main()
