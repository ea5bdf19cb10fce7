"""What a long bench has found so far, so that one that was interrupted goes on where it stopped.

A line for each step, in `measured.jsonl` of the store that its runs are kept in. It counts for the code and the processor that
it was measured with: figures of two versions do not go together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from unskew.benchmarks.report import processor

_Found = TypeVar("_Found")
_ROOT = Path(__file__).resolve().parents[1]


class _Line(msgspec.Struct, frozen=True):
    code: str
    processor: str
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
            line = _Line(code_digest(), processor(), step, self._lines[step])
            with self._path.open("ab") as lines:
                lines.write(b"\n" + msgspec.json.encode(line))  # first of all it ends what a kill may have left half-written
        return msgspec.json.decode(self._lines[step], type=kind)


def _read(path: Path) -> dict[str, msgspec.Raw]:
    found: dict[str, msgspec.Raw] = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError:
            continue
        if (line.code, line.processor) == (code_digest(), processor()):
            found[line.step] = line.found
    return found


@cache
def code_digest() -> str:
    """Of all modules of this checkout."""
    digest = hashlib.sha256()
    rooms = sorted(room for room in _ROOT.iterdir() if room.is_dir() and not room.name.startswith("."))
    for path in (path for room in rooms for path in sorted(room.rglob("*.py"))):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
