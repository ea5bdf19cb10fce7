"""Reading people's text files: lines with numbers, JSON with a sentence for what is wrong, gzip where it is one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.formats.imported import FormatError

_GZIP = b"\x1f\x8b"


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked when it is gzip. Raises `FormatError`."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, the first is 1; what is no UTF-8 is replaced."""
    return enumerate(content(path).decode(errors="replace").splitlines(), start=1)


def json_of(path: Path, line: int, text: str | bytes) -> Any:
    """`text` as JSON; `FormatError` names the file and the line (on which the text begins) otherwise."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}, line {line}: not JSON ({error})") from error


LARGEST = 2**53
"""What a number of a file may be: beyond, a double does not tell one whole number from the next."""


def number(where: str, name: str, value: object) -> float:
    """`value` as a number of at most `LARGEST`, either way; `FormatError` otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    raise FormatError(f"{where}: {name} is {value!r}, a number up to 2^53 is needed")
