"""A versioned stream of control events with one writer process: low rate, on disk before `append` returns, never dropped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import time_ns
from urllib.parse import quote

import msgspec

from unskew.collector.events import Control
from unskew.collector.files.manifest import load, sync_folder
from unskew.collector.files.segment import SpoolSegment, control_line, flush, is_torn, segment_name, segment_names, unpack
from unskew.collector.locks import hold
from unskew.collector.paths import Store, StoreError, checked_name


class VersionConflict(Exception):  # noqa: N818 - the name of the contract
    """The stream is not at the version that the caller decided upon."""


class _Version(msgspec.Struct):
    version: int


class ControlStream:
    """Appends to stream `stream` of a run as `writer`; continues at the version on disk.

    Its lines lie in a folder of their own, ``<writer>@<stream>``, in which an event's seq is its version (the first is 1).
    Raises `StoreError` when another living process writes the stream.
    """

    def __init__(self, store: Store, run: str, stream: str, writer: str) -> None:
        self._stream, self._writer = stream, writer
        file_name = quote(stream, safe="").replace("%", "+")
        self._folder = store.spool(run) / f"{checked_name('writer', writer)}@{checked_name('stream', file_name)}"
        store.make(self._folder)
        lock = hold(store.lock(f"stream-{run}-{file_name}"))
        if lock is None:
            raise StoreError(f"stream {stream} of run {run} has another writer: each control stream has one")
        self._lock = lock
        self._segment: SpoolSegment | None = None
        self._outcome_unknown = False
        self._version = _last_version(store, run, f"@{file_name}")
        self._unwritten = 0

    @property
    def version(self) -> int:
        """The version of the last event; 0 = the stream is empty."""
        return self._version

    @property
    def unwritten(self) -> int:
        """How many events were refused for the disk's sake."""
        return self._unwritten

    @property
    def removed(self) -> bool:
        """Whether somebody removed what was written: the log of the run is lost."""
        return self._segment is not None and self._segment.removed

    def append(self, expected_version: int, events: Sequence[Control], *, actor: str) -> int:
        """Write `events` as one batch, all or none, and return the new version.

        Raises `VersionConflict` when the stream is not at `expected_version`, `StoreError` when the disk refuses. When
        nobody knows what the disk then holds, every later append is refused: no version may be given to two events.
        """
        if expected_version != self._version:
            raise VersionConflict(f"stream {self._stream} is at version {self._version}, not {expected_version}")
        if not events:
            return self._version
        at_us = time_ns() // 1000
        lines = [
            control_line(at_us, self._stream, version, actor, event)
            for version, event in enumerate(events, start=self._version + 1)
        ]
        try:
            self._write(flush(b"".join(lines)))
        except StoreError:
            self._unwritten += len(events)
            raise
        self._version += len(events)
        return self._version

    def add(self, *events: Control, actor: str = "") -> int:
        """`append` one batch at whatever version the stream has, as `actor` or as the writer itself: nobody else writes it."""
        return self.append(self._version, events, actor=actor or self._writer)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._lock.release()

    def _write(self, data: bytes) -> None:
        where = f"stream {self._stream} in {self._folder}"
        if self._outcome_unknown:
            raise StoreError(f"{where} is in doubt since a write failed: restart its writer once the disk is well")
        if self.removed:
            raise StoreError(f"{where} was removed: the log of the run is lost")
        try:
            if self._segment is None:
                path = self._folder / segment_name(self._version + 1)
                if path.exists() and not is_torn(path.read_bytes()):
                    raise StoreError(f"{path} is damaged, and {where} would go on in its place: move it away first")
                self._segment = SpoolSegment(self._folder, self._version + 1)
            before = self._segment.size
            whole = self._segment.write(data) == len(data)
            self._outcome_unknown = True
            if whole:
                self._segment.sync()
                if not before:  # a file is found again by its name, and that by those of its folders
                    for folder in (self._folder, *self._folder.parents[:3]):
                        sync_folder(folder)
            else:
                self._segment.cut(before)
            self._outcome_unknown = False
        except OSError as error:
            raise StoreError(f"cannot write {where}: {error.strerror or error}") from error
        if not whole:
            raise StoreError(f"cannot write {where}: the disk is full")


def _last_version(store: Store, run: str, suffix: str) -> int:
    """The stream's last version, in its spool files or, where those are gone, in what the manifest records of them.

    In this order: a collector that seals them meanwhile names them in the manifest before it removes them.
    """
    last = 0
    with suppress(FileNotFoundError):
        for folder in store.spool(run).glob(f"*{suffix}"):
            for name in reversed(segment_names(folder)):
                lines = unpack((folder / name).read_bytes()).lines.splitlines()
                if lines:
                    last = max(last, msgspec.json.decode(lines[-1], type=_Version).version)
                    break
    sealed = [replaced.last_seq for _, replaced in load(store).replaced(run) if replaced.writer.endswith(suffix)]
    return max([last, *sealed])
