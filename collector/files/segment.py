"""A spool file ("segment"): flushes of lines appended by one process, named by the first seq in it.

A line is the envelope's fields spliced in front of the encoded event, so that an event is encoded once. While its writer lives
it holds a shared lock on the file; a file without that lock is final: nobody ever reopens a segment.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from unskew.collector.events import Event

SUFFIX = ".jsonl"
_NAME = re.compile(r"[0-9]+\.jsonl")
_encode = msgspec.json.Encoder().encode


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


def control_line(at_us: int, stream: str, version: int, actor: str, event: Event) -> bytes:
    """A line of a control stream, whose seq is its version."""
    envelope = b'{"seq":%d,"at_us":%d,"stream":%b,"version":%d,"actor":%b,%b\n'
    return envelope % (version, at_us, _encode(stream), version, _encode(actor), _encode(event)[1:])


class SpoolSegment:
    """An open segment; `write` may be short when the disk is full, exactly like `os.write`."""

    def __init__(self, folder: Path, first_seq: int) -> None:
        # O_TRUNC: a file of this name can only hold a torn first line of a writer that died, which no reader has taken.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        while True:  # the collector removes an empty folder, or an empty file without a lock, when it thinks the run is over
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / segment_name(first_seq), flags, 0o644)
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
