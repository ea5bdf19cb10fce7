"""Following the spool files of a run: new whole flushes, in order per writer. Controller, collector, readers: one loop."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from math import nan
from operator import or_
from pathlib import Path

import msgspec

from unskew.collector.events import CONTROL, TELEMETRY, Event, RunStarted
from unskew.collector.files.segment import SUFFIX, first_seq, is_torn, segment_name, segment_names, unpack
from unskew.collector.files.upcasters import upcast, with_device_kind
from unskew.collector.paths import Store

READ_BYTES = 4 * 1024 * 1024
"""About this much per poll, in fair shares of all writers, so that catching up stays in small batches."""

_LINE_BYTES = 1024

Place = tuple[str, int]
"""(writer, segment): a spool file of a run, the segment by its first seq."""


class SpoolLines(msgspec.Struct, frozen=True, gc=False):
    """New whole lines of one spool file, each with its newline."""

    writer: str
    segment: int
    data: bytes


class Damage(msgspec.Struct, frozen=True):
    """A passage of a spool file that is not what was written and was passed over; `at_byte` None: one line that is no event."""

    writer: str
    segment: int
    at_byte: int | None
    bytes: int

    def sentence(self, run: str) -> str:
        """As a problem of the log of `run`."""
        file = f"spool/{run}/{self.writer}/{segment_name(self.segment)}"
        if self.at_byte is None:
            return f"run {run}: {self.bytes} lines of {file} are no events and were passed over"
        return f"run {run}: {self.bytes} bytes at byte {self.at_byte} of {file} are damaged and were passed over"


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
        self,
        store: Store,
        run: str,
        *,
        offsets: Mapping[Place, int] | None = None,
        skip: Collection[Place] = (),
        only: str = "",
    ) -> None:
        """`only`: leave out writers whose name lacks this."""
        self._folder = store.spool(run)
        self._only = only
        self.skip = skip
        self._taken: dict[str, int] = {}
        self._current: dict[str, str] = {}
        self.offsets: dict[Place, int] = dict(offsets or {})
        self.damage: list[Damage] = []
        """What was passed over so far."""
        self.behind = False
        """Whether a writer held more than the last poll took: poll again."""

    @classmethod
    def of_decisions(cls, store: Store, run: str) -> Tail:
        """Of the control streams alone, from what is written now on; what they hold already is not read."""
        tail = cls(store, run, only="@")
        for path in tail._folder.glob(f"*@*/*{SUFFIX}"):
            tail.offsets[path.parent.name, first_seq(path.name)] = path.stat().st_size
        return tail

    def poll(self) -> list[Entry]:
        """The lines since the last poll, decoded, about READ_BYTES of them; a flush that is cut short waits for its rest."""
        entries: list[Entry] = []
        for lines in self.poll_lines():
            for line in lines.data.split(b"\n")[:-1]:
                try:
                    envelope = _decode_envelope(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.damage.append(Damage(lines.writer, lines.segment, None, len(line)))
                else:
                    if envelope.seq > self._taken.get(lines.writer, -1):
                        entries.append(_entry((lines.writer, lines.segment), envelope, line))
        return entries

    def only_after(self, entries: Iterable[Entry]) -> None:
        """From now on `poll` leaves out what each writer had written when it wrote the last of `entries`."""
        for entry in entries:
            self._taken[entry.writer] = max(entry.seq, self._taken.get(entry.writer, -1))

    def poll_lines(self) -> list[SpoolLines]:
        """As `poll`, undecoded: a line may be no envelope."""
        found: list[SpoolLines] = []
        waiting, left = self._writers(), READ_BYTES
        while waiting and left > 0:
            # What a writer leaves of its share goes to those that have more.
            share = max(1, left // len(waiting))
            read = [self._read_writer(writer, share, found) for writer in waiting]
            waiting = [writer for writer, size in zip(waiting, read, strict=True) if size >= share]
            left -= sum(read)
        self.behind = bool(waiting)
        return found

    def _writers(self) -> list[str]:
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - half the cost of iterdir, many times a second
        except FileNotFoundError:
            return []
        return sorted(name for name in names if self._only in name)

    def _read_writer(self, writer: str, share: int, found: list[SpoolLines]) -> int:
        """Append a writer's new lines, up to `share` bytes and a flush's rest; less than `share` = there is no more now."""
        folder, size = self._folder / writer, 0
        # Listed before reading: when a next file is there, the one before it has all its lines.
        names = segment_names(folder)
        for name in names:
            if name < self._current.get(writer, ""):
                continue
            place = (writer, first_seq(name))
            if place in self.skip:
                continue
            size += self._read_segment(place, share - size, found)
            if size >= share:
                break
            rest = b"" if name == names[-1] else _read(folder / name, self.offsets.get(place, 0), READ_BYTES)
            if rest and not ("@" in writer and is_torn(rest)):
                self.damage.append(Damage(*place, self.offsets.get(place, 0), len(rest)))
            self._current[writer] = name
        return size

    def _read_segment(self, place: Place, limit: int, found: list[SpoolLines]) -> int:
        """Append the new lines of one file; returns how many bytes were read, less than `limit` when there is no more now."""
        path, offset = self._folder / place[0] / segment_name(place[1]), self.offsets.get(place, 0)
        data = _read(path, offset, limit)
        if not data:
            return 0
        unpacked, whole = unpack(data), len(data) < limit
        for _ in range(2):
            if whole or unpacked.used == len(data) or (unpacked.used and not unpacked.missing):
                break
            # The rest of a flush, or of a line; behind damage, whatever shows where it ends.
            more = unpacked.missing or (READ_BYTES if b"\n" in data else _LINE_BYTES)
            rest = _read(path, offset + len(data), more)
            data, whole = data + rest, len(rest) < more
            unpacked = unpack(data)
        self.damage += [Damage(*place, offset + at, size) for at, size in unpacked.damaged]
        if unpacked.used:
            self.offsets[place] = offset + unpacked.used
        if unpacked.lines:
            found.append(SpoolLines(*place, unpacked.lines))
        return unpacked.used if whole else max(len(data), limit)


def _entry(place: Place, envelope: _Envelope, line: bytes) -> Entry:
    return Entry(
        writer=place[0],
        segment=place[1],
        seq=envelope.seq,
        at_us=envelope.at_us,
        stream=envelope.stream,
        version=envelope.version,
        actor=envelope.actor,
        event=decode_event(line),
        raw=line,
    )


def decode_event(line: bytes) -> Event | None:
    """The event of a line; None for a type, or a version of it, that this code does not know."""
    for decode in (_decode_event, _decode_with_care):
        try:
            event: Event = decode(line)
        except (msgspec.ValidationError, UnicodeDecodeError):
            continue
        return with_device_kind(event) if isinstance(event, RunStarted) else event
    return None


def _decode_with_care(line: bytes) -> Event:
    """An old version, or a NaN: JSON writes it as null, and an iteration with a diverged loss is committed all the same."""
    fields = {name: nan if value is None else value for name, value in upcast(msgspec.json.decode(line)).items()}
    event: Event = msgspec.convert(fields, _AnyEvent)
    return event


def _read(path: Path, offset: int, limit: int) -> bytes:
    """At most `limit` bytes from `offset` on; nothing when the file is gone, or is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - the one call per idle file and poll
        if status.st_size <= offset or not stat.S_ISREG(status.st_mode):
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""
