"""Queries that people ask often, as files beside this module: the first comment lines of each describe its answer."""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile

import msgspec

_COMMENT = "--"


class SavedQuery(msgspec.Struct, frozen=True):
    name: str
    description: str
    sql: str


def saved_queries() -> dict[str, SavedQuery]:
    """By name, in alphabetical order."""
    found = {}
    for file in sorted(files("unskew.collector.read").joinpath("queries").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            text = file.read_text(encoding="utf-8")
            comment = takewhile(lambda line: line.startswith(_COMMENT), text.splitlines())
            name = file.name.removesuffix(".sql")
            found[name] = SavedQuery(name, " ".join(line.removeprefix(_COMMENT).strip() for line in comment), text)
    return found
