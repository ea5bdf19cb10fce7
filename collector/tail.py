"""Following the spool files of a run: new whole lines, in order per writer. Controller, collector, readers: one loop."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import reduce
from math import nan
from operator import or_
from pathlib import Path

import msgspec

from unskew.collector.events import CONTROL, TELEMETRY, Event
from unskew.collector.paths import Store
from unskew.collector.segment import segment_name, segment_names

READ_BYTES = 4 * 1024 * 1024
"""At most this much of one file per poll, so that catching up stays in small batches."""

Place = tuple[str, int]
"""(writer, segment): a spool file of a run, the segment by its first seq."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One line. `event` is None for a type (or a version of it) that this code does not know; `raw` is the line as written."""

    writer: str
    segment: int
    seq: int
    at_us: int
    stream: str | None
    version: int | None
    actor: str | None
    event: Event | None
    raw: bytes


class _Envelope(msgspec.Struct, gc=False):
    seq: int
    at_us: int
    stream: str | None = None
    version: int | None = None
    actor: str | None = None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_AnyEvent = reduce(or_, (*TELEMETRY, *CONTROL))
_decode_event = msgspec.json.Decoder(_AnyEvent).decode


class Tail:
    """Reads on from `offsets` (bytes per spool file, default the beginning of all) and leaves out the files in `skip`."""

    def __init__(
        self, store: Store, run: str, *, offsets: Mapping[Place, int] | None = None, skip: Collection[Place] = ()
    ) -> None:
        self._folder = store.spool(run)
        self._skip = skip
        self._current: dict[str, str] = {}
        self.offsets: dict[Place, int] = dict(offsets or {})
        self.broken = 0
        """Whole lines so far that are not an envelope (a damaged file); they are passed over."""
        self.behind = False
        """Whether a file held more than the last poll took."""

    def poll(self) -> list[Entry]:
        """The lines since the last poll; a torn last line waits for its rest."""
        try:
            writers = sorted(os.listdir(self._folder))  # noqa: PTH208 - half the cost of iterdir, many times a second
        except FileNotFoundError:
            return []
        self.behind = False
        entries: list[Entry] = []
        for writer in writers:
            self._read_writer(writer, entries)
        return entries

    def _read_writer(self, writer: str, entries: list[Entry]) -> None:
        folder = self._folder / writer
        # Listed before reading: when a next file is there, the one before it has all its lines.
        for name in segment_names(folder):
            if name < self._current.get(writer, ""):
                continue
            place = (writer, int(name.split(".")[0]))
            if place in self._skip:
                continue
            if not self._read_segment(place, entries):
                self.behind = True
                return
            self._current[writer] = name

    def _read_segment(self, place: Place, entries: list[Entry]) -> bool:
        """Append the new lines of one file; False when it holds more than one poll takes."""
        offset = self.offsets.get(place, 0)
        data = _read(self._folder / place[0] / segment_name(place[1]), offset)
        whole = data.rfind(b"\n") + 1
        if whole:
            self.offsets[place] = offset + whole
            for line in data[: whole - 1].split(b"\n"):
                try:
                    envelope = _decode_envelope(line)
                except msgspec.DecodeError:
                    self.broken += 1
                else:
                    entries.append(_entry(place, envelope, line))
        return len(data) < READ_BYTES


def _entry(place: Place, envelope: _Envelope, line: bytes) -> Entry:
    return Entry(
        writer=place[0],
        segment=place[1],
        seq=envelope.seq,
        at_us=envelope.at_us,
        stream=envelope.stream,
        version=envelope.version,
        actor=envelope.actor,
        event=_event(line),
        raw=line,
    )


def _event(line: bytes) -> Event | None:
    for decode in (_decode_event, _decode_with_nan):
        try:
            event: Event = decode(line)
        except msgspec.ValidationError:
            continue
        return event
    return None


def _decode_with_nan(line: bytes) -> Event:
    """JSON has no NaN, it is written as null; an iteration with a diverged loss is committed all the same."""
    fields = {name: nan if value is None else value for name, value in msgspec.json.decode(line).items()}
    event: Event = msgspec.convert(fields, _AnyEvent)
    return event


def _read(path: Path, offset: int) -> bytes:
    """Up to READ_BYTES behind `offset`, or more when they hold no whole line; nothing when the file is gone."""
    try:
        if os.stat(path).st_size <= offset:  # noqa: PTH116 - the one call per idle file and poll
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(READ_BYTES)
            return data if b"\n" in data or len(data) < READ_BYTES else data + file.read()
    except FileNotFoundError:
        return b""
