"""What a decoder found wrong with somebody's file or option, in words for people."""

from __future__ import annotations

import re

_KINDS = {
    "str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing",
}  # fmt: skip


def complaint(error: Exception) -> str:
    """msgspec's message in words, the place first: `rule 1, name: a whole number is given, a text is needed`.

    Other errors keep their words.
    """
    what, _, where = str(error).partition(" - at ")
    if kinds := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", what):
        what = f"{_in_words(kinds[2])} is given, {_in_words(kinds[1])} is needed"
    elif field := re.fullmatch(r"Object (contains unknown|missing required) field `([^`]+)`", what):
        what = f"{field[2]} is {'not known' if 'unknown' in field[1] else 'missing'}"
    elif value := re.fullmatch(r"Invalid enum value (.+)", what):
        what = f"{value[1]} is not known"
    place = _place(where)
    return f"{place}: {what}" if place else what


def _in_words(kinds: str) -> str:
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | "))


def _place(where: str) -> str:
    """A path in a document: elements of a list are counted from 1."""
    parts = re.findall(r"\.(\w+)|\[(\d+)\]", where)
    named = (name or f"\0{int(index) + 1}" for name, index in parts)
    return ", ".join(named).replace(", \0", " ").replace("\0", "")
