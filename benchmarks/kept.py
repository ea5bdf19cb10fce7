"""What a long bench has found so far, so that one that was interrupted goes on where it stopped.

A line for each step, in `measured.jsonl` of the store that its runs are kept in. It counts for the code, the processor and the
versions that it was measured with: figures of two do not go together.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from unskew.benchmarks.report import machine

_Found = TypeVar("_Found")
_ROOT = Path(__file__).resolve().parents[1]


class _Line(msgspec.Struct, frozen=True):
    code: str
    machine: dict[str, str | int]
    date: str
    step: str
    found: msgspec.Raw


class KeptSteps:
    """The steps that were measured into this folder, by any process before; where there is none, nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "measured.jsonl"
        self._lines: dict[str, msgspec.Raw] | None = None

    def of(self, step: str, measure: Callable[[], _Found], kind: type[_Found]) -> _Found:
        """What was found at this step, or what `measure` finds now, which is kept."""
        if not self._path.parent.is_dir():
            return measure()
        if self._lines is None:
            self._lines = _read(self._path)
        if step not in self._lines:
            self._lines[step] = msgspec.Raw(msgspec.json.encode(measure()))
            line = _Line(code_digest(), _machine(), datetime.now(UTC).date().isoformat(), step, self._lines[step])
            with self._path.open("ab") as lines:
                lines.write(b"\n" + msgspec.json.encode(line))  # first of all it ends what a kill may have left half-written
        return msgspec.json.decode(self._lines[step], type=kind)


def _read(path: Path) -> dict[str, msgspec.Raw]:
    found: dict[str, msgspec.Raw] = {}
    dates = set()
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError:
            continue
        if (line.code, line.machine) == (code_digest(), _machine()):
            found[line.step] = line.found
            dates.add(line.date)
    if found:
        print(f"steps measured before count: {len(found)}, of {', '.join(sorted(dates))} ({path})", file=sys.stderr)
    return found


def _machine() -> dict[str, str | int]:
    return {name: value for name, value in machine().items() if name != "date"}


@cache
def code_digest() -> str:
    """Of all modules of this checkout, and the tables that they read."""
    digest = hashlib.sha256()
    rooms = sorted(room for room in _ROOT.iterdir() if room.is_dir() and not room.name.startswith("."))
    paths = [path for room in rooms for kind in ("*.py", "*.toml") for path in sorted(room.rglob(kind))]
    for path in paths:
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
