"""The form of a spool file ("segment"): lines appended by one process, flush by flush, named by the first seq in it.

A line is the envelope's fields spliced in front of the encoded event, so that an event is encoded once. A flush is a header
with the checksum and size of the lines behind it:

    {"crc32":2774613413,"bytes":493}
    {"seq":0,"at_us":1763738412000000,"type":"span@1",...}
    {"seq":1,...}

A reader takes a flush whole or not at all: one that a kill cut short is as if it had never been written, and one whose checksum
does not fit is damaged, passed over and named. A header is a JSON line without `seq`, so tools for JSON lines can leave it out.
A line that begins with `seq` where a header is expected was written before flushes had checksums; it counts alone. A line of a
flush may stand for several (loop_parts.py): who reads is given these.

While its writer lives it holds a shared lock on the file; a file without that lock is final: nobody ever reopens a segment.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec

from unskew.collector.events import Event
from unskew.collector.files.loop_parts import LoopPart, expand
from unskew.collector.rights import make_folder, open_file

SUFFIX = ".jsonl"
_NAME = re.compile(r"[0-9]+\.jsonl")
_HEADER = b'{"crc32":'
_LINE = b'{"seq":'
_TYPE = b',"type":'
_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines


def segment_name(first_seq: int) -> str:
    return f"{first_seq:012d}{SUFFIX}"


def first_seq(name: str) -> int:
    """What a segment is named by."""
    return int(name.removesuffix(SUFFIX))


def segment_names(folder: Path) -> list[str]:
    """The segments of a writer's folder in order, whatever else lies there; none when the folder is gone."""
    try:
        return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))  # noqa: PTH208 - half the cost of iterdir
    except (FileNotFoundError, NotADirectoryError):
        return []


def telemetry_line(seq: int, at_us: int, event: Event) -> bytes:
    """A line of telemetry. Raises TypeError, ValueError or OverflowError when the event holds what JSON cannot."""
    return b'{"seq":%d,"at_us":%d,%b\n' % (seq, at_us, _encode(event)[1:])


class _Place(msgspec.Struct, gc=False):
    """The envelope of a line of telemetry."""

    seq: int
    at_us: int


def telemetry_lines(first_seq: int, batch: Iterable[tuple[int, Event | LoopPart]]) -> tuple[bytes, int]:
    """The lines of events, or parts of a loop, each with when (ns), numbered from `first_seq` on; and the seq behind the last.

    Like `telemetry_line` of each, at two thirds of the cost: envelopes and events are encoded in one go, then spliced.
    """
    seq, found = first_seq, list[object]()
    for at_ns, event in batch:
        if isinstance(event, LoopPart):
            found.append((seq, at_ns // 1000, event))  # as `line_of` encodes it
            seq += event.n_events
        else:
            found += (_Place(seq, at_ns // 1000), event)
            seq += 1
    return _TYPE.join(_encode_lines(found).split(b"}\n{" + _TYPE[1:])), seq


def control_line(at_us: int, stream: str, version: int, actor: str, event: Event) -> bytes:
    """A line of a control stream, whose seq is its version."""
    envelope = b'{"seq":%d,"at_us":%d,"stream":%b,"version":%d,"actor":%b,%b\n'
    return envelope % (version, at_us, _encode(stream), version, _encode(actor), _encode(event)[1:])


class _Header(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    crc32: int
    bytes: int


_decode = msgspec.json.Decoder(_Header).decode


class DecodedFlushes(msgspec.Struct, frozen=True):
    """What some bytes of a spool file hold: whole lines, how many bytes are dealt with, and the damage among these.

    `damaged`: (first byte, bytes) of each passage that is not what was written, counted from where reading began.
    `missing`: so many bytes more are needed at least to go on (0: at an end, or nothing shows it). `unchecked`: how many of the
    lines have no checksum.
    """

    lines: bytes
    used: int
    damaged: tuple[tuple[int, int], ...] = ()
    missing: int = 0
    unchecked: int = 0


def flush(lines: bytes) -> bytes:
    """`lines` (each ending in a newline) as one flush."""
    return b'{"crc32":%d,"bytes":%d}\n%b' % (crc32(lines), len(lines), lines)


def unpack(data: bytes) -> DecodedFlushes:
    """The whole flushes and lines that `data`, which begins where one begins, holds."""
    taken: list[bytes] = []
    damaged: list[tuple[int, int]] = []
    at, missing, unchecked = 0, 0, 0
    while at < len(data):
        if data.startswith(_LINE, at):
            end = _end_of_lines(data, at)
            if end == at:
                break
            taken.append(data[at:end])
            unchecked += data.count(b"\n", at, end)
            at = end
            continue
        body = data.find(b"\n", at) + 1
        if not body:
            break
        header = _header(data[at:body])
        if header is not None:
            end = body + header.bytes
            if end <= len(data) and crc32(data[body:end]) == header.crc32:
                taken.append(expand(data[body:end], telemetry_line))
                at = end
                continue
            after = end if end == len(data) or data.startswith(_HEADER, end) else data.find(b"\n" + _HEADER, body - 1) + 1
            if not after:  # cut short, still being written, or a size that is damaged: the next header shows it
                missing = max(end - len(data), 0)
                break
        else:
            after = _next_start(data, body)
        damaged.append((at, after - at))
        at = after
    return DecodedFlushes(b"".join(taken), at, tuple(damaged), missing, unchecked)


def is_torn(rest: bytes) -> bool:
    """Whether `rest`, the end of a file that nobody writes any more, is what a kill leaves of a flush or a line (or nothing).

    Anything else that `unpack` does not take there is damage.
    """
    body = rest.find(b"\n") + 1
    if not body:
        return True
    header = _header(rest[:body])
    return header is not None and body + header.bytes > len(rest) and crc32(rest[body:]) != header.crc32


def _header(line: bytes) -> _Header | None:
    if not line.startswith(_HEADER):
        return None
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _end_of_lines(data: bytes, at: int) -> int:
    """The end of the lines of the old form that begin at `at`: before the next header or line of neither form."""
    while data.startswith(_LINE, at):
        end = data.find(b"\n", at) + 1
        if not end:
            break
        at = end
    return at


def _next_start(data: bytes, at: int) -> int:
    """Where the next flush or line of the old form begins, from the line at `at` on; else the end of the whole lines."""
    while not data.startswith((_LINE, _HEADER), at):
        end = data.find(b"\n", at) + 1
        if not end:
            break
        at = end
    return at


class SpoolSegment:
    """An open segment; `write` may be short when the disk is full, exactly like `os.write`."""

    def __init__(self, folder: Path, first_seq: int) -> None:
        self.first = first_seq
        # O_TRUNC: a file of this name can only hold a torn first line of a writer that died, which no reader has taken.
        flags = os.O_WRONLY | os.O_APPEND | os.O_TRUNC
        while True:  # the collector removes an empty folder, or an empty file without a lock, when it thinks the run is over
            make_folder(folder)
            self._descriptor = open_file(folder / segment_name(first_seq), flags)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)
        self.size = 0

    def write(self, data: bytes) -> int:
        """One `os.write`; returns the bytes written."""
        written = os.write(self._descriptor, data)
        self.size += written
        return written

    @property
    def removed(self) -> bool:
        """Whether somebody removed the file: what is written to it nobody will read."""
        return os.fstat(self._descriptor).st_nlink == 0

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def cut(self, size: int) -> None:
        """Take back what a failed write left behind `size`."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def held_final(path: Path) -> Iterator[int | None]:
    """The size of a segment whose writer is gone, and nobody becomes one meanwhile; None while the writer may still append."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def final_size(path: Path) -> int | None:
    """The size of a segment whose writer is gone, or None while the writer may still append."""
    with held_final(path) as size:
        return size
