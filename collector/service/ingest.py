"""What the collector takes: spool files that nobody writes any more, read whole and once.

Nothing is held in between: the spool is the truth until the manifest names the sealed file that replaces it, and the manifest
is swapped in one breath. A collector that was killed leaves nothing to go on with, so no line is lost and none is taken twice,
whatever was killed and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import msgspec

from unskew.collector.files import rows
from unskew.collector.files.manifest import SealedSpool, load
from unskew.collector.files.segment import final_size, first_seq, is_torn, segment_names, unpack
from unskew.collector.files.tail import Damage, Place, SpoolLines
from unskew.collector.paths import Store

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "memory_limit": "256MB",
    "preserve_insertion_order": False,
}
"""Of every DuckDB that the collector works with; what needs more goes to the store's folder `spill`."""


class FinalSegment(msgspec.Struct, frozen=True):
    """A spool file that nobody writes any more and that is in no sealed file; `last` of its writer's. Not empty."""

    path: Path
    place: Place
    bytes: int
    written_ns: int
    last: bool


class UnsealedSpool(msgspec.Struct, frozen=True):
    """The spool files of a run that no sealed file replaces: those that are final, oldest first, and what else there is.

    `live`: whether lines may still come into any of the others. `bytes` are of all.
    """

    final: tuple[FinalSegment, ...]
    live: bool
    bytes: int


class SpoolBatch(msgspec.Struct, frozen=True):
    """Spool files as they were read: the lines of each, as the manifest will name it, and what was passed over."""

    lines: tuple[SpoolLines, ...]
    files: tuple[SealedSpool, ...]
    damage: tuple[Damage, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def unsealed(store: Store, run: str) -> UnsealedSpool:
    """What there is to take of `run`, now or later."""
    done = {(file.writer, file.segment) for _, file in load(store).replaced(run)}
    final, live, size = list[FinalSegment](), False, 0
    for folder in store.spool(run).iterdir():
        names = segment_names(folder)
        for name in names:
            path, place = folder / name, (folder.name, first_seq(name))
            if place in done:
                continue
            whole = final_size(path)
            if whole is None:
                live = True
            status = path.stat()
            size += status.st_size
            # An empty one may be in the hands of a writer that has not locked it yet.
            if whole:
                final.append(FinalSegment(path, place, whole, status.st_mtime_ns, name == names[-1]))
        if segment_names(folder)[-1:] != names[-1:]:  # one was let go after its next one was there, which was not seen
            live = True
    final.sort(key=lambda file: (file.written_ns, file.place))
    return UnsealedSpool(tuple(final), live, size)


def take(files: Sequence[FinalSegment]) -> SpoolBatch:
    """Read `files`; each line is an event's, unless `rows` finds otherwise."""
    lines, taken, damage = list[SpoolLines](), list[SealedSpool](), list[Damage]()
    for file in files:
        data = file.path.read_bytes()
        unpacked = unpack(data)
        damage += [Damage(*file.place, at, size) for at, size in unpacked.damaged]
        rest = data[unpacked.used :]
        # Of telemetry no torn file has a next one; a control stream's writer comes back after a kill, under the same name.
        if rest and not ((file.last or "@" in file.place[0]) and is_torn(rest)):
            damage.append(Damage(*file.place, unpacked.used, len(rest)))
        writer, segment = file.place
        count, last_seq = unpacked.lines.count(b"\n"), _last_seq(unpacked.lines)
        taken.append(SealedSpool(writer=writer, segment=segment, bytes=unpacked.used, rows=count, last_seq=last_seq))
        if count:
            lines.append(SpoolLines(writer, segment, unpacked.lines))
    return SpoolBatch(tuple(lines), tuple(taken), tuple(damage))


class _Seq(msgspec.Struct):
    seq: int


_decode_seq = msgspec.json.Decoder(_Seq).decode


def _last_seq(lines: bytes) -> int:
    """The seq of the last line; -1 when it has none."""
    try:
        return _decode_seq(lines[lines.rfind(b"\n", 0, -1) + 1 :]).seq
    except (msgspec.DecodeError, UnicodeDecodeError):
        return -1


def working_database(store: Store) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory with the collector's limits and an empty table `hot`, which view `log` shows."""
    database = duckdb.connect(":memory:", config={**SETTINGS, "temp_directory": str(store.spill)})
    database.execute("set enable_progress_bar = false").fetchall()  # it would go to collector.log
    rows.create_table(database, "hot")
    database.execute("create view log as select * from hot").fetchall()
    return database
