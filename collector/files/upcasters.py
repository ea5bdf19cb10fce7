"""Old versions of event types, read as the newest: pure steps v1 -> v2 -> ..., chained on read; what is written stays as it is.

A step is data, because it is needed twice: for a line in Python (`upcast`) and for rows in SQL (`rows_of`). A new field with a
default needs none: an absent field is its default. A type that is known in no version is kept raw and visible in `events`.
The fields of a span are columns of the log: they may be added, never renamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from unskew.collector.events import DeviceKind, Event, RunStarted, tag_of


class Upcast(msgspec.Struct, frozen=True, kw_only=True):
    """How a line of type `old` becomes one of type `new`: fields renamed, then removed, then added with a value."""

    old: str
    new: str
    renamed: Mapping[str, str] = {}
    removed: tuple[str, ...] = ()
    added: Mapping[str, Any] = {}

    def line(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a line."""
        fresh = {self.renamed.get(name, name): value for name, value in fields.items() if name not in self.removed}
        return {**fresh, **self.added, "type": self.new}

    def sql(self, payload: str) -> str:
        """The same for a JSON text in SQL: a merge patch, in which NULL removes."""
        patch = {"type": _literal(self.new)}
        patch |= dict.fromkeys((*self.renamed, *self.removed), "null")
        patch |= {new: f"{payload}->'{old}'" for old, new in self.renamed.items()}
        patch |= {name: f"{_literal(json.dumps(value))}::json" for name, value in self.added.items()}
        members = ", ".join(f"{_literal(name)}, {value}" for name, value in patch.items())
        return f"json_merge_patch({payload}, json_object({members}))"


STEPS: dict[str, Upcast] = {}
"""By the version that they start from. A step is never changed once a version that it reads was written."""


def upcast(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line in the newest version of its type."""
    while (step := STEPS.get(fields.get("type", ""))) is not None:
        fields = step.line(fields)
    return fields


def with_device_kind(started: RunStarted) -> RunStarted:
    """Old versions had the kind of device in the sentence alone: "sleep: 8 ranks have ...", "real: 2 ranks on 2 GPUs"."""
    if started.device_kind is not None:
        return started
    kinds: dict[str, DeviceKind] = {
        "sleep": "sleep", "virtual": "virtual", "real": "gpus" if "GPU" in started.device else "cores"
    }  # fmt: skip
    return msgspec.structs.replace(started, device_kind=kinds.get(re.split("[:,]", started.device)[0]))


def rows_of(event: type[Event], source: str) -> str:
    """A SELECT of all columns of the rows of relation `source` that are this event in any version, `payload` in the newest."""
    tag = tag_of(event)
    parts = [f"select * from {source} where type = {_literal(tag)}"]
    for steps in _chains(tag):
        payload = "payload::json"
        for step in steps:
            payload = step.sql(payload)
        parts.append(
            f"select * replace (({payload})::varchar as payload, {_literal(tag)} as type) "
            f"from {source} where type = {_literal(steps[0].old)}"
        )
    return " union all by name ".join(parts)


def _chains(tag: str) -> list[list[Upcast]]:
    """For each old version of `tag`, the steps that lead to it."""
    chains: list[list[Upcast]] = []
    for step in STEPS.values():
        if step.new == tag:
            chains += [[step], *([*before, step] for before in _chains(step.old))]
    return chains


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
