"""Reading people's text files: lines with numbers, JSON with a sentence for what is wrong, gzip where it is one."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.formats.imported import LARGEST, FormatError

_GZIP = b"\x1f\x8b"
MOST_UNPACKED = 100
"""Times its packed size that a gzip file may unpack to (traces: 10 to 30): what asks for more was made to fill the memory."""
LEAST_UNPACKED_BYTES = 64 * 1024**2
"""Any may unpack to so much: logs that hardly vary are packed better."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOST_RANKS = 2**31
CUT = msgspec.UNSET


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked when it is gzip, without a byte order mark. Raises `FormatError`."""
    try:
        raw = path.read_bytes()
        raw = _unpacked(path, raw) if raw.startswith(_GZIP) else raw
        return raw.removeprefix(_BYTE_ORDER_MARK)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _unpacked(path: Path, raw: bytes) -> bytes:
    most = max(LEAST_UNPACKED_BYTES, MOST_UNPACKED * len(raw))
    with gzip.open(io.BytesIO(raw)) as file:
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise FormatError(f"{path} unpacks to more than {most / 1e6:,.0f} MB, which is no log: unpack it yourself if it is one")
    return unpacked


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, the first is 1; what is no UTF-8 is replaced.

    A whole line keeps its end, so that one which was cut short can be recognised.
    """
    return enumerate(io.StringIO(content(path).decode(errors="replace"), newline=None), start=1)


def json_of(path: Path, line: int, text: str | bytes) -> Any:
    """`text` as JSON; `FormatError` names the file and the line (on which the text begins) otherwise."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path}, line {line}: not JSON ({error})") from error


def json_line(path: Path, line: int, text: str) -> Any:
    """As `json_of`, of a line of a log; `CUT` where it ends before its JSON does, as what a killed process wrote last."""
    raw = text.strip().encode()
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        if "truncated" in str(error) or f"(byte {len(raw)})" in str(error):
            return CUT
    except RecursionError:
        pass
    return json_of(path, line, raw)


def cut_notes(cut: Sequence[int]) -> tuple[str, ...]:
    """What a person should know of lines that were cut short."""
    if not cut:
        return ()
    which = f"line {cut[0]} is" if len(cut) == 1 else f"{len(cut)} lines, line {cut[0]} first, are"
    return (f"{which} cut short, as by a process that was killed, and passed over",)


def number(where: str, name: str, value: object) -> float:
    """`value` as a number of at most `LARGEST`, positive or negative; `FormatError` otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    raise FormatError(f"{where}: {name} is {value!r}, a number up to 2^53 is needed")


def whole(where: str, name: str, value: object, least: int = -LARGEST) -> int:
    """`value` as a whole number of at least `least`; `FormatError` otherwise: 1.5 is no step."""
    found = number(where, name, value)
    if found != int(found) or found < least:
        raise FormatError(f"{where}: {name} is {value!r}, a whole number{f' from {least}' * (least > -LARGEST)} is needed")
    return int(found)


def rank_number(where: str, value: object) -> int:
    """`value` as a rank; `FormatError` otherwise."""
    if (rank := whole(where, "rank", value, 0)) >= MOST_RANKS:
        raise FormatError(f"{where}: rank is {value!r}, it must be less than 2^31")
    return rank


def microseconds(where: str, name: str, value: object, unit_us: float) -> int:
    """`value`, a time of `unit_us` each, in microseconds; `FormatError` beyond `LARGEST` of these."""
    found = unit_us * number(where, name, value)
    if abs(found) > LARGEST:
        raise FormatError(f"{where}: {name} is {value!r}, a time up to 2^53 us is needed")
    return round(found)


def duration(where: str, name: str, value: object, unit_us: float) -> int:
    """As `microseconds`, and not negative."""
    if (found := microseconds(where, name, value, unit_us)) < 0:
        raise FormatError(f"{where}: {name} is negative ({value!r})")
    return found
