"""Sealing: spool files that are final become one sorted Parquet file; the manifest's swap is the moment of change for readers.

While a run lives, files that rotation closed are sealed once they hold SEAL_ROWS rows, and stay on disk, because its controller
follows them. When the run is over (no controller, no writer left) the rest is sealed and the spool files are removed. Each step
may be cut by a kill: what is not in the manifest is swept away and done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from unskew.collector.commands import controller_alive
from unskew.collector.ingest import Ingest
from unskew.collector.manifest import Manifest, Replaced, Sealed, load, publish
from unskew.collector.paths import Store, StoreError, make_folder
from unskew.collector.rows import quoted
from unskew.collector.segment import final_size, first_seq, segment_names
from unskew.collector.tail import Place

SEAL_ROWS = 20_000
ROW_GROUP_ROWS = 50_000


def seal(store: Store, ingest: Ingest, run: str) -> int:
    """Seal what is due of `run`; returns the rows sealed. Raises `StoreError` when the database lacks rows it claims."""
    manifest = load(store)
    final, live = _final_files(store, ingest, run, manifest)
    over = not live and not controller_alive(store, run)
    count = sum(file.rows for file in final)
    sealed = manifest.sealed
    if count and (over or count >= SEAL_ROWS):
        number = manifest.next_sealing(run)
        sealed = (*sealed, _write_sealed(store, ingest, run, number, final))
    problems = tuple(dict.fromkeys((*manifest.problems, *(_problems(ingest, run) if over else ()))))
    if (sealed, problems) != (manifest.sealed, manifest.problems):
        publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, sealed=sealed, problems=problems))
    if over:
        _remove_spool(store, ingest, run)
        ingest.forget(run)
        _drop_names(store)
    return sum(one.rows for one in sealed[len(manifest.sealed) :])


def sweep(store: Store) -> None:
    """Remove what a killed collector wrote but did not publish, and from the manifest what it removed."""
    manifest = load(store)
    listed = {one.file for one in (*manifest.sealed, *manifest.published)}
    for path in (*(store.root / "sealed").glob("*/*"), *(store.root / "published").glob("*")):
        if str(path.relative_to(store.root)) not in listed:
            path.unlink()
    _drop_names(store)


def _drop_names(store: Store) -> None:
    """Names of spool files that are gone would make every reader's manifest grow for ever."""
    manifest = load(store)
    smaller = manifest.without_names(store.spooled_runs())
    if smaller.sealed != manifest.sealed:
        publish(store, smaller)


def _final_files(store: Store, ingest: Ingest, run: str, manifest: Manifest) -> tuple[list[Replaced], bool]:
    """The unsealed files that are final and taken whole, and whether lines may still come in any other."""
    done = {(replaced.writer, replaced.segment) for _, replaced in manifest.replaced(run)}
    taken = ingest.files(run)
    final, live = [], False
    for path, place in _segments(store, run):
        if place in done:
            continue
        if not _is_over(path, ingest.offset(run, place)):
            live = True
        elif place in taken:
            final.append(taken[place])
    return final, live


def _segments(store: Store, run: str) -> Iterator[tuple[Path, Place]]:
    for folder in store.spool(run).iterdir():
        for name in segment_names(folder):
            yield folder / name, (folder.name, first_seq(name))


def _is_over(path: Path, offset: int) -> bool:
    """Whether nobody writes a spool file any more and no line in it is left to take; a torn one never will be."""
    if final_size(path) is None:
        return False
    with path.open("rb") as file:
        file.seek(offset)
        return b"\n" not in file.read()


def _write_sealed(store: Store, ingest: Ingest, run: str, number: int, files: list[Replaced]) -> Sealed:
    make_folder(store.sealed(run))
    path = store.sealed(run) / f"{number:06d}.parquet"
    fresh = path.with_suffix(".new")
    due = ", ".join(f"({quoted(file.writer)}, {file.segment})" for file in files)
    (count, last_pos) = ingest.database.sql(
        f"select count(*), max(pos) from log where run = {quoted(run)} and (writer, segment) in ({due})"
    ).fetchall()[0]
    if count != sum(file.rows for file in files):
        raise StoreError(f"{store.database} holds {count} of {sum(file.rows for file in files)} rows due of run {run}")
    ingest.database.execute(
        f"copy (select * from log where run = {quoted(run)} and (writer, segment) in ({due}) "
        f"order by iteration nulls first, rank, writer, seq) "
        f"to {quoted(str(fresh))} (format parquet, compression zstd, row_group_size {ROW_GROUP_ROWS})"
    ).fetchall()
    with fresh.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
    fresh.chmod(0o444)
    fresh.replace(path)
    return Sealed(
        run=run,
        file=str(path.relative_to(store.root)),
        rows=count,
        sha256=digest,
        last_pos=last_pos,
        replaces=tuple(files),
        first=number,
        last=number,
    )


def _problems(ingest: Ingest, run: str) -> list[str]:
    """What a complete log would not show, one sentence each."""
    gaps = ingest.database.execute(
        "select writer, max(seq) - min(seq) + 1 - count(*) from log where run = ? group by writer "
        "having count(*) != max(seq) - min(seq) + 1 order by writer",
        [run],
    ).fetchall()
    streams = ingest.database.execute(
        "select stream, count(*), count(distinct version), max(version) from log where run = ? and stream is not null "
        "group by stream having count(*) != max(version) or count(distinct version) != max(version) order by stream",
        [run],
    ).fetchall()
    found = [f"run {run}: writer {writer} lacks {lost} lines" for writer, lost in gaps]
    found += [
        f"run {run}: stream {stream} has {events} events, {distinct} versions, the last is {last}: each must be there once"
        for stream, events, distinct, last in streams
    ]
    if broken := ingest.broken(run):
        found.append(f"run {run}: {broken} lines could not be read and were passed over")
    return found


def _remove_spool(store: Store, ingest: Ingest, run: str) -> None:
    """Remove what is sealed and what holds nothing: a writer that never wrote, a line that was torn."""
    for path, place in list(_segments(store, run)):
        if _is_over(path, ingest.offset(run, place)):
            path.unlink()
    for folder in (*store.spool(run).iterdir(), store.spool(run)):
        with contextlib.suppress(OSError):  # not empty: somebody began to write again
            folder.rmdir()
