"""Sealing: spool files that are final become sorted Parquet files; the manifest's swap is the moment of change for readers.

While a run lives, files that rotation closed are sealed once there are SEAL_BYTES of them, and stay on disk, because its
controller follows them. When the run is over (no controller, no writer left) the rest is sealed and spool files are removed.
Telemetry and control events go to files of their own, because retention drops whole files. Each step may be cut by a kill: what
is not in the manifest is swept away and done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import msgspec

from unskew.collector.events import IterationCommitted, RunFinished, RunStarted, tag_of
from unskew.collector.files import rows
from unskew.collector.files.manifest import Kind, Manifest, SealedFile, SealedSpool, begin, load, publish, sync_folder
from unskew.collector.files.rows import quoted
from unskew.collector.files.segment import first_seq, held_final, segment_name, segment_names, unpack
from unskew.collector.files.tail import Damage, Place
from unskew.collector.paths import Store, StoreError
from unskew.collector.rights import mode_of_files
from unskew.collector.service.ingest import FinalSegment, SpoolBatch, take, unsealed
from unskew.collector.service.snapshot import WRITING, files_read
from unskew.collector.write.commands import controller_alive
from unskew.collector.write.control_stream import ControlStream

SEAL_BYTES = 12 * 1024 * 1024
"""About 50,000 spans as they lie in the spool."""
SEAL_MOST_BYTES = 32 * 1024 * 1024
"""A sealing takes no more, so that it needs little memory and is soon done however far the collector lags."""
ROW_GROUP_ROWS = 50_000
ORDER = "iteration nulls first, rank, writer, seq"
_FORM = f"(format parquet, parquet_version v2, compression zstd, compression_level 9, row_group_size {ROW_GROUP_ROWS})"
_LAST = re.compile(r"(?:[0-9]+-)?([0-9]+)\b")
"""The last sealing in a sealed file, by its name."""
ENDED_BY = "collector"
"""Who wrote the end of a run whose controller left none."""
_KINDS: tuple[Kind, ...] = ("telemetry", "control")


class SealResult(msgspec.Struct, frozen=True):
    """What a sealing did and left of a run: rows sealed, bytes of its spool that are due still, bytes that are not sealed."""

    rows: int
    due_bytes: int
    unsealed_bytes: int


def seal(store: Store, database: duckdb.DuckDBPyConnection, run: str) -> int:
    """Seal all that is due of `run`; returns the rows sealed."""
    sealed, due = 0, True
    while due:
        one = seal_next(store, database, run)
        sealed, due = sealed + one.rows, one.due_bytes > 0
    return sealed


def seal_next(store: Store, database: duckdb.DuckDBPyConnection, run: str) -> SealResult:
    """Seal the oldest of what is due of `run`, SEAL_MOST_BYTES at most; a run that is over and sealed loses its spool."""
    found = unsealed(store, run)
    over = not found.live and not controller_alive(store, run)
    size, left = sum(file.bytes for file in found.final), list(found.final)
    if not over and size < SEAL_BYTES:
        return SealResult(0, 0, found.bytes)
    sealed = 0
    while left and not sealed:  # files without a line that can be read give no rows
        portion = _portion(left)
        left = left[len(portion) :]
        sealed = _seal_files(store, database, run, portion)
    left_bytes = sum(file.bytes for file in left)
    if over and not left and _end_unfinished(store, database, run):
        return SealResult(sealed, 1, found.bytes - size)  # its last words are due
    if over and not left:
        _name_problems(store, _holes(store, database, run))
        _remove_spool(store, run)
        _drop_names(store)
    return SealResult(sealed, left_bytes if over or left_bytes >= SEAL_BYTES else 0, found.bytes - size + left_bytes)


def _end_unfinished(store: Store, database: duckdb.DuckDBPyConnection, run: str) -> bool:
    """Write the last words of a run whose controller is gone without any, once all it logged is sealed; whether it was so."""
    stream, writer = f"run/{run}", "controller"
    files = [quoted(str(store.root / one.file)) for one in load(store).sealed if one.run == run]
    if not files or not any(folder.name.startswith(f"{writer}@") for folder in store.spool(run).iterdir()):
        return False
    ((started, ended, iterations),) = database.sql(
        "select count(*) filter (type = $1), count(*) filter (type = $2), count(distinct iteration) filter (type = $3) "
        f"from read_parquet([{', '.join(files)}], union_by_name = true)",
        params=[tag_of(RunStarted), tag_of(RunFinished), tag_of(IterationCommitted)],
    ).fetchall()
    if not started or ended:
        return False
    log = ControlStream(store, run, stream, writer)
    why = (
        "its controller was gone without a word: it was killed, or its machine, or its disk was full; what the log lacks of "
        "its end is not known; the collector ended the run"
    )
    log.add(RunFinished(status="failed", iterations=iterations, reason=why), actor=ENDED_BY)
    log.close()
    return True


def sweep(store: Store) -> None:
    """Remove what a killed collector wrote but did not publish, and from the manifest what it removed; what store.duckdb reads
    stays.

    Raises `StoreError`, and removes nothing, when the manifest does not fit the sealed files: they may be all that is left.
    """
    manifest = load(store)
    for problem in unlisted(store, manifest):
        raise StoreError(problem)
    listed = {one.file for one in manifest.sealed} | {one.file for one in manifest.published}
    with WRITING:
        read = files_read(store)
        for path in (*(store.root / "sealed").glob("*/*"), *(store.root / "published").glob("*")):
            if read is not None and str(path.relative_to(store.root)) not in listed | read:
                path.unlink()
    _drop_names(store)


def unlisted(store: Store, manifest: Manifest) -> Iterator[str]:
    """The sealed files that are not in the manifest and hold what nothing else may hold: a sentence about each.

    A killed collector leaves two kinds of files: a sealing's, whose spool files are all there still, and a compaction's or a
    retention's, whose sealings the manifest knows. Anything else is there because the manifest was put back from before it.
    """
    listed = {one.file for one in manifest.sealed}
    gone = {one.run for one in manifest.sealed if not (store.root / one.file).is_file()}
    for path in sorted((store.root / "sealed").glob("*/*.parquet")):
        file, run = str(path.relative_to(store.root)), path.parent.name
        last, known = _LAST.match(path.name), manifest.next_sealing(run)
        if file in listed or last is None:
            continue
        if int(last[1]) < known and run not in gone:
            continue
        if int(last[1]) == known and _in_spool(store, run, path):
            continue
        yield (
            f"run {run}: {file} is not in {store.manifest.name}, which is older than that: put the newest one back from a "
            "copy of the store; nothing is sealed or removed until then"
        )


def _in_spool(store: Store, run: str, path: Path) -> bool:
    """Whether the spool has every file that a sealed one was made of; of one that cannot be read, whether it has any."""
    try:
        with duckdb.connect(":memory:") as database:
            query = f"select distinct writer, segment from read_parquet({quoted(str(path))})"
            held = database.execute(query).fetchall()
    except duckdb.Error:
        return store.spool(run).is_dir()
    return all((store.spool(run) / writer / segment_name(segment)).exists() for writer, segment in held)


def write_sorted(database: duckdb.DuckDBPyConnection, source: str, path: Path) -> str:
    """Write the rows of the SQL relation `source` in the form of a sealed file, durable under its name; returns its sha256."""
    fresh = path.with_suffix(".new")
    database.execute(f"copy (select * from {source} order by {ORDER}) to {quoted(str(fresh))} {_FORM}").fetchall()
    with fresh.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
    fresh.chmod(mode_of_files(path.parent) & 0o444)
    fresh.replace(path)
    sync_folder(path.parent)
    return digest


def extent(database: duckdb.DuckDBPyConnection, source: str) -> dict[str, int | None]:
    """What a `SealedFile` records of the rows in the SQL relation `source`: rows, last_pos, and the least and greatest."""
    answer = database.sql(
        "select count(*) as rows, max(pos) as last_pos, min(iteration) as first_iteration, max(iteration) as last_iteration, "
        f"min(at_us) as first_at_us, max(at_us) as last_at_us from {source}"
    )
    return dict(zip(answer.columns, answer.fetchall()[0], strict=True))


def _seal_files(store: Store, database: duckdb.DuckDBPyConnection, run: str, due: Sequence[FinalSegment]) -> int:
    """One sealing: a file per kind of event. Returns its rows."""
    manifest = load(store)
    number, first_pos = manifest.next_sealing(run), manifest.next_pos
    files, problems = list[SealedFile](), list[Damage]()
    for kind in _KINDS:
        taken = take([file for file in due if ("@" in file.place[0]) == (kind == "control")])
        problems += taken.damage
        if taken.lines:
            one, lost = _write_sealed(store, database, run, taken, first_pos, number=number, kind=kind)
            files += one
            problems += lost
            first_pos += taken.rows
    sentences = (*manifest.problems, *(one.sentence(run) for one in problems))
    fresh = msgspec.structs.replace(
        manifest, number=manifest.number + 1, sealed=(*manifest.sealed, *files), problems=tuple(dict.fromkeys(sentences))
    )
    if files or fresh.problems != manifest.problems:
        publish(store, fresh)
    return sum(one.rows for one in files)


def _write_sealed(
    store: Store, database: duckdb.DuckDBPyConnection, run: str, taken: SpoolBatch, first_pos: int, *, number: int, kind: Kind
) -> tuple[list[SealedFile], list[Damage]]:
    """The sealed file of what was taken, none when no line is an event's, and what of it is none."""
    begin(store)
    store.make(store.sealed(run))
    for folder in (store.root, store.root / "sealed"):
        sync_folder(folder)
    path = store.sealed(run) / f"{number:06d}-{kind}.parquet"
    digest = rows.from_lines(database, run, taken.lines, first_pos, lambda source: write_sorted(database, f"({source})", path))
    written = f"read_parquet({quoted(str(path))})"
    about = extent(database, written)
    files, lost = taken.files, list[Damage]()
    if about["rows"] != taken.rows:
        files, lost = _counted(database, written, taken)
    if sum(file.rows for file in files) != about["rows"]:
        raise StoreError(f"{path} has {about['rows']} rows of the {taken.rows} lines that it was made of")
    if not about["rows"]:
        path.unlink()
        return [], lost
    fields = {
        "run": run,
        "file": str(path.relative_to(store.root)),
        "sha256": digest,
        "replaces": files,
        "kind": kind,
        "first": number,
        "last": number,
        **about,
    }
    return [msgspec.convert(fields, SealedFile)], lost


def _counted(
    database: duckdb.DuckDBPyConnection, written: str, taken: SpoolBatch
) -> tuple[tuple[SealedSpool, ...], list[Damage]]:
    """The files as they are in what was written, and how many lines of each are no events."""
    held = {
        (writer, segment): (count, last_seq)
        for writer, segment, count, last_seq in database.execute(
            f"select writer, segment, count(*), max(seq) from {written} group by all"
        ).fetchall()
    }
    files, lost = list[SealedSpool](), list[Damage]()
    for file in taken.files:
        place = (file.writer, file.segment)
        count, last_seq = held.get(place, (0, -1))
        files.append(msgspec.structs.replace(file, rows=count, last_seq=last_seq))
        if count < file.rows:
            lost.append(Damage(*place, None, file.rows - count))
    return tuple(files), lost


def _portion(final: Sequence[FinalSegment]) -> Sequence[FinalSegment]:
    """The first files, up to SEAL_MOST_BYTES, one at least."""
    size = 0
    for number, file in enumerate(final):
        size += file.bytes
        if size > SEAL_MOST_BYTES and number:
            return final[:number]
    return final


def _drop_names(store: Store) -> None:
    """Names of spool files that are gone would make every reader's manifest grow for ever."""
    manifest = load(store)
    smaller = manifest.without_names(store.spooled_runs())
    if smaller.sealed != manifest.sealed:
        publish(store, smaller)


def _segments(store: Store, run: str) -> Iterator[tuple[Path, Place]]:
    for folder in store.spool(run).iterdir():
        for name in segment_names(folder):
            yield folder / name, (folder.name, first_seq(name))


def _name_problems(store: Store, problems: Sequence[str]) -> None:
    """Add problems to the manifest, where every reader sees them."""
    manifest = load(store)
    sentences = tuple(dict.fromkeys((*manifest.problems, *problems)))
    if sentences != manifest.problems:
        publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, problems=sentences))


def _holes(store: Store, database: duckdb.DuckDBPyConnection, run: str) -> list[str]:
    """What the complete log of a run that is over would not show, one sentence each."""
    manifest = load(store)
    files = [quoted(str(store.root / one.file)) for one in manifest.sealed if one.run == run]
    if not files or any(one.run == run for one in manifest.pruned):
        return []
    log = f"read_parquet([{', '.join(files)}], union_by_name = true)"
    gaps = database.sql(
        f"select writer, {rows.DUE_OF_WRITER} - count(*) from {log} group by writer "
        f"having count(*) != {rows.DUE_OF_WRITER} order by writer"
    ).fetchall()
    streams = database.sql(
        f"select stream, count(*), count(distinct version), max(version) from {log} where stream is not null "
        "group by stream having count(*) != max(version) or count(distinct version) != max(version) order by stream"
    ).fetchall()
    found = [
        f"run {run}: writer {writer} {f'lacks {lost} lines' if lost > 0 else f'has {-lost} lines twice'}"
        for writer, lost in gaps
    ]
    found += [
        f"run {run}: stream {stream} has {events} events, {distinct} versions, the last is {last}: each must be there once"
        for stream, events, distinct, last in streams
    ]
    return found


def _remove_spool(store: Store, run: str) -> None:
    """Remove what is sealed and what holds nothing: a writer that never wrote, a flush that was torn."""
    sealed = {(file.writer, file.segment) for _, file in load(store).replaced(run)}
    for path, place in list(_segments(store, run)):
        with held_final(path) as size:
            if place in sealed or (size is not None and not unpack(path.read_bytes()).lines):
                path.unlink()
    for folder in (*store.spool(run).iterdir(), store.spool(run)):
        with contextlib.suppress(OSError):  # not empty: somebody began to write again
            folder.rmdir()
    sync_folder(store.root / "spool")  # before the manifest forgets their names
