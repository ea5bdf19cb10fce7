"""Sealing: spool files that are final become sorted Parquet files; the manifest's swap is the moment of change for readers.

While a run lives, files that rotation closed are sealed once they hold SEAL_ROWS rows, and stay on disk, because its controller
follows them. When the run is over (no controller, no writer left) the rest is sealed and the spool files are removed. Telemetry
and control events go to files of their own, because retention drops whole files. Each step may be cut by a kill: what is not in
the manifest is swept away and done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import msgspec

from unskew.collector.commands import controller_alive
from unskew.collector.flushes import is_torn, unpack
from unskew.collector.ingest import Ingest, Taken
from unskew.collector.manifest import Kind, Sealed, load, publish
from unskew.collector.paths import Store, StoreError, make_folder
from unskew.collector.rows import quoted
from unskew.collector.segment import final_size, first_seq, segment_names
from unskew.collector.tail import Damage, Place

SEAL_ROWS = 50_000
SEAL_MOST_ROWS = 400_000
"""A sealing takes no more, so that it needs little memory however far the collector lags."""
ROW_GROUP_ROWS = 50_000
ORDER = "iteration nulls first, rank, writer, seq"
_FORM = f"(format parquet, parquet_version v2, compression zstd, compression_level 9, row_group_size {ROW_GROUP_ROWS})"
_KINDS: tuple[Kind, ...] = ("telemetry", "control")


def seal(store: Store, ingest: Ingest, run: str) -> int:
    """Seal what is due of `run`; returns the rows sealed. Raises `StoreError` when rows are not there that were taken."""
    if ingest.is_behind(run):
        return _seal_due(store, ingest, run, _taken_whole(ingest, run))
    final, live = _final_files(store, ingest, run)
    over = not live and not controller_alive(store, run)
    sealed = _seal_due(store, ingest, run, final, all_of_it=over)
    _tell(store, _damage(ingest, run) + (_holes(store, ingest, run) if over else []))
    if over:
        _remove_spool(store, ingest, run)
        ingest.forget(run)
        _drop_names(store)
    return sealed


def _seal_due(store: Store, ingest: Ingest, run: str, final: Sequence[Taken], *, all_of_it: bool = False) -> int:
    """Seal `final` in portions, when there is enough of it or all is to be sealed; returns the rows."""
    sealed = 0
    while final and (all_of_it or sum(file.rows for file in final) >= SEAL_ROWS):
        due = _portion(final)
        final = final[len(due) :]
        sealed += _seal_files(store, ingest, run, due)
    return sealed


def _taken_whole(ingest: Ingest, run: str) -> list[Taken]:
    """While the collector lags: the files behind which it has begun a later one of the same writer."""
    newest: dict[str, int] = {}
    for writer, segment in ingest.files(run):
        newest[writer] = max(segment, newest.get(writer, -1))
    whole = [file for file in ingest.files(run).values() if file.segment < newest[file.writer] and file.rows]
    return sorted(whole, key=lambda file: (file.first_pos, file.writer, file.segment))


def sweep(store: Store) -> None:
    """Remove what a killed collector wrote but did not publish, and from the manifest what it removed."""
    manifest = load(store)
    listed = {one.file for one in manifest.sealed} | {one.file for one in manifest.published}
    for path in (*(store.root / "sealed").glob("*/*"), *(store.root / "published").glob("*")):
        if str(path.relative_to(store.root)) not in listed:
            path.unlink()
    _drop_names(store)


def write_sorted(database: duckdb.DuckDBPyConnection, source: str, path: Path) -> str:
    """Write the rows of the SQL relation `source` in the form of a sealed file, durable under its name; returns its sha256."""
    fresh = path.with_suffix(".new")
    database.execute(f"copy (select * from {source} order by {ORDER}) to {quoted(str(fresh))} {_FORM}").fetchall()
    with fresh.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
    fresh.chmod(0o444)
    fresh.replace(path)
    return digest


def extent(database: duckdb.DuckDBPyConnection, source: str) -> dict[str, int | None]:
    """What a `Sealed` tells of the rows in the SQL relation `source`: rows, last_pos, and the least and greatest."""
    answer = database.sql(
        "select count(*) as rows, max(pos) as last_pos, min(iteration) as first_iteration, max(iteration) as last_iteration, "
        f"min(at_us) as first_at_us, max(at_us) as last_at_us from {source}"
    )
    return dict(zip(answer.columns, answer.fetchall()[0], strict=True))


def _seal_files(store: Store, ingest: Ingest, run: str, due: Sequence[Taken]) -> int:
    """One sealing: a file per kind of event. Returns its rows."""
    manifest = load(store)
    number = manifest.next_sealing(run)
    files: list[Sealed] = []
    for kind in _KINDS:
        of_kind = [file for file in due if ("@" in file.writer) == (kind == "control")]
        if of_kind:
            files.append(_write_sealed(store, ingest, run, of_kind, number=number, kind=kind))
    publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, sealed=(*manifest.sealed, *files)))
    ingest.sealed(run, [file.replaced() for file in due])
    return sum(one.rows for one in files)


def _write_sealed(store: Store, ingest: Ingest, run: str, files: Sequence[Taken], *, number: int, kind: Kind) -> Sealed:
    make_folder(store.sealed(run))
    path = store.sealed(run) / f"{number:06d}-{kind}.parquet"
    places = ", ".join(f"({quoted(file.writer)}, {file.segment})" for file in files)
    source = f"(select * from hot where run = {quoted(run)} and (writer, segment) in ({places}))"
    about = extent(ingest.database, source)
    claimed = sum(file.rows for file in files)
    if about["rows"] != claimed:
        raise StoreError(f"the collector holds {about['rows']} of {claimed} rows due of run {run}")
    digest = write_sorted(ingest.database, source, path)
    fields = {
        "run": run,
        "file": str(path.relative_to(store.root)),
        "sha256": digest,
        "replaces": tuple(file.replaced() for file in files),
        "kind": kind,
        "first": number,
        "last": number,
        **about,
    }
    return msgspec.convert(fields, Sealed)


def _portion(final: Sequence[Taken]) -> Sequence[Taken]:
    """The first files, up to SEAL_MOST_ROWS rows, one at least."""
    rows = 0
    for number, file in enumerate(final):
        rows += file.rows
        if rows > SEAL_MOST_ROWS and number:
            return final[:number]
    return final


def _drop_names(store: Store) -> None:
    """Names of spool files that are gone would make every reader's manifest grow for ever."""
    manifest = load(store)
    smaller = manifest.without_names(store.spooled_runs())
    if smaller.sealed != manifest.sealed:
        publish(store, smaller)


def _final_files(store: Store, ingest: Ingest, run: str) -> tuple[list[Taken], bool]:
    """The unsealed files that are final and taken whole, oldest first, and whether lines may still come in any other."""
    done = {(replaced.writer, replaced.segment) for _, replaced in load(store).replaced(run)}
    taken = ingest.files(run)
    final, live = [], False
    for path, place in _segments(store, run):
        if place in done:
            continue
        if not _is_over(path, ingest.offset(run, place)):
            live = True
        elif place in taken and taken[place].rows:
            final.append(taken[place])
    return sorted(final, key=lambda file: (file.first_pos, file.writer, file.segment)), live


def _segments(store: Store, run: str) -> Iterator[tuple[Path, Place]]:
    for folder in store.spool(run).iterdir():
        for name in segment_names(folder):
            yield folder / name, (folder.name, first_seq(name))


def _is_over(path: Path, offset: int) -> bool:
    """Whether nobody writes a spool file any more and nothing in it is left to take; what is torn or damaged never will be."""
    size = final_size(path)
    return size is not None and (size == offset or not unpack(_rest(path, offset)).used)


def _rest(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def _tell(store: Store, problems: Sequence[str]) -> None:
    """Into the manifest, where every reader sees it."""
    manifest = load(store)
    told = tuple(dict.fromkeys((*manifest.problems, *problems)))
    if told != manifest.problems:
        publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, problems=told))


def _damage(ingest: Ingest, run: str) -> list[str]:
    """What was passed over, one sentence each."""
    return [sentence(run, one) for one in ingest.damage(run)]


def sentence(run: str, damage: Damage) -> str:
    """Damage as a problem of the log."""
    file = f"spool/{run}/{damage.writer}/{damage.segment:012d}.jsonl"
    if damage.at_byte is None:
        return f"run {run}: {damage.bytes} lines of {file} are no events and were passed over"
    return f"run {run}: {damage.bytes} bytes at byte {damage.at_byte} of {file} are damaged and were passed over"


def _holes(store: Store, ingest: Ingest, run: str) -> list[str]:
    """What the complete log of a run that is over would not show, one sentence each."""
    manifest = load(store)
    files = [quoted(str(store.root / one.file)) for one in manifest.sealed if one.run == run]
    if not files or any(one.run == run for one in manifest.pruned):
        return []
    log = f"read_parquet([{', '.join(files)}], union_by_name = true)"
    gaps = ingest.database.sql(
        f"select writer, max(seq) - min(seq) + 1 - count(*) from {log} group by writer "
        "having count(*) != max(seq) - min(seq) + 1 order by writer"
    ).fetchall()
    streams = ingest.database.sql(
        f"select stream, count(*), count(distinct version), max(version) from {log} where stream is not null "
        "group by stream having count(*) != max(version) or count(distinct version) != max(version) order by stream"
    ).fetchall()
    found = [f"run {run}: writer {writer} lacks {lost} lines" for writer, lost in gaps]
    found += [
        f"run {run}: stream {stream} has {events} events, {distinct} versions, the last is {last}: each must be there once"
        for stream, events, distinct, last in streams
    ]
    return found


def _remove_spool(store: Store, ingest: Ingest, run: str) -> None:
    """Remove what is sealed and what holds nothing: a writer that never wrote, a flush that was torn."""
    for path, place in list(_segments(store, run)):
        if not _is_over(path, ingest.offset(run, place)):
            continue
        if (rest := _rest(path, ingest.offset(run, place))) and not is_torn(rest):
            _tell(store, [sentence(run, Damage(*place, ingest.offset(run, place), len(rest)))])
        path.unlink()
    for folder in (*store.spool(run).iterdir(), store.spool(run)):
        with contextlib.suppress(OSError):  # not empty: somebody began to write again
            folder.rmdir()
