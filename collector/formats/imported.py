"""What every importer returns, how bad input is reported, and how whole runs get into a store at once.

An importer is a pure reader: a path in, `ImportedRun` runs out, or a `FormatError` with one sentence: which file and line (or
row), what is wrong, what is allowed. `store_runs` writes the events where nobody looks and moves a finished run into place by
one rename, so that a reader sees all of it or nothing.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.events import RunFinished, RunStarted, Telemetry
from unskew.collector.files.manifest import load
from unskew.collector.locks import hold
from unskew.collector.paths import Store, StoreError, checked_name
from unskew.collector.read.reader import Reader
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

LARGEST = 2**53
"""What a number of a file may be: beyond, a double does not distinguish one whole number from the next."""

_BATCH = 5_000
_DISK_PATIENCE_S = 60.0
_LONGEST_NAME = 200
"""Of a run: files of the store have it in their names, with a prefix."""


class FormatError(ValueError):
    """A file that is not what it should be; the message is one sentence with file and line or row."""


class ImportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its source reports it. `facts`: what is true of the whole run; `ranks` (0 = the source names none) and
    `iterations`: how many the source has; `name`: what distinguishes it from other runs of the same source; `notes`: what a
    person should know of how the source was read, a sentence each."""

    events: Iterable[Telemetry]
    ranks: int
    iterations: int
    facts: dict[str, Any]
    name: str = ""
    notes: tuple[str, ...] = ()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run comes from, and the name it gets; `sha256` is `fingerprint(path)`."""

    run: str
    format: str
    path: Path
    sha256: str


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """`already`: the same content was in the store under this name, and nothing was written."""

    run: str
    format: str
    source: str
    ranks: int
    iterations: int
    events: int
    already: bool = False
    notes: tuple[str, ...] = ()


def source_files(path: Path, *suffixes: str) -> list[Path]:
    """`path` itself, or the files of that folder with one of the suffixes. Raises `FormatError` when there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FormatError(f"{path}: there is no such file or folder")
    found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(suffixes))
    if not found:
        named = " or ".join(filter(None, suffixes))
        raise FormatError(f"{path}: no file in this folder ends in {named}" if named else f"{path}: this folder holds no file")
    return found


def fingerprint(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files with their names. Raises `FormatError` when it cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file()):
            if file != path:
                digest.update(file.name.encode() + b"\0")
            with file.open("rb") as content:
                while block := content.read(1 << 20):
                    digest.update(block)
    except OSError as error:
        raise FormatError(f"{error.filename or path}: {error.strerror}") from error
    return digest.hexdigest()


def run_name(path: Path, sha256: str, wanted: str | None, part: str) -> str:
    """`wanted`, else the file's name; then the part's of a source of many runs; then, unless wanted, the content's hash."""
    words = [wanted or _plain(path.resolve().name.partition(".")[0])]
    words += [_plain(part)] if part else []
    words += [] if wanted else [sha256[:8]]
    name = "-".join(words)
    if len(name) > _LONGEST_NAME:
        raise FormatError(f"{path}: its run would be named {name[:40]}..., of {len(name)} letters; {_LONGEST_NAME} are allowed")
    return name


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-._+") or "imported"


def stored_already(store: Store, sources: Sequence[Source]) -> set[str]:
    """The runs of `sources` that the store holds with just this content. Raises `FormatError` when it holds another."""
    known = {*store.spooled_runs(), *(sealed.run for sealed in load(store).sealed)}
    taken = [source for source in sources if checked_name("run", source.run) in known]
    if not taken:
        return set()
    with Reader(store) as reader:
        rows = reader.sql("select run, options->>'sha256' as sha256 from runs").rows()
    held = dict(rows)
    for source in taken:
        if held.get(source.run) != source.sha256:
            raise FormatError(
                f"run {source.run} is in {store.root} already and holds something else: choose another name with --run"
            )
    return {source.run for source in taken}


def store_runs(store: Store, runs: Sequence[tuple[Source, ImportedRun]]) -> list[int]:
    """Write runs whole, all of them or none; returns the number of events of each.

    Raises `StoreError` or, from the reading, `FormatError`. The clock of the runs is "imported": times are the source's own.
    The log's wall clock (`at_us`) is the time of the import.
    """
    _sweep(store)
    store.make()  # a lock alone would make it with the rights of the folder around it
    with ExitStack() as cleaning:
        places, counts = [], []
        for source, imported in runs:
            lock = hold(store.lock(f"import-{checked_name('run', source.run)}"))
            if lock is None:
                raise StoreError(f"run {source.run} is being imported by another process")
            cleaning.push(lock)
            if stored_already(store, [source]):  # sealed by now, its place in the spool would be free
                raise StoreError(f"run {source.run} has been imported by another process meanwhile")
            aside = store.root / "importing" / source.run
            cleaning.callback(shutil.rmtree, aside, ignore_errors=True)
            places.append((aside / "spool" / source.run, store.spool(source.run)))
            store.make(aside)
            counts.append(_write(Store(aside), source, imported))
        store.make(store.root / "spool")
        for written, place in places:
            try:
                written.rename(place)
            except OSError as error:
                raise StoreError(f"cannot put {place.name} into {store.root}: {error.strerror}") from error
    return counts


def _sweep(store: Store) -> None:
    """Remove what imports that were killed have left."""
    aside = store.root / "importing"
    for folder in aside.iterdir() if aside.is_dir() else ():
        if (lock := hold(store.lock(f"import-{folder.name}"), wait_s=0.0)) is not None:
            with lock:
                shutil.rmtree(folder, ignore_errors=True)


def _write(aside: Store, source: Source, imported: ImportedRun) -> int:
    run, count, events = source.run, 0, iter(imported.events)
    telemetry = SpoolWriter(aside, run, "import")
    try:
        for batch in _batches(events):
            for event in batch:
                telemetry.append(event)
            count += len(batch)
            if not telemetry.hand_over(_DISK_PATIENCE_S):
                raise StoreError(f"cannot write run {run} to {aside.root}: the disk takes no more")
    finally:
        closed = telemetry.close(_DISK_PATIENCE_S)
    if not closed:
        raise StoreError(f"cannot write run {run} to {aside.root}: the disk takes no more")
    stream = ControlStream(aside, run, f"run/{run}", "import")
    try:
        stream.append(
            0,
            [
                RunStarted(
                    run=run,
                    device="imported",
                    clock="imported",
                    mode="observe",
                    ranks=imported.ranks,
                    options={
                        "format": source.format,
                        "source": str(source.path),
                        "sha256": source.sha256,
                        "facts": imported.facts,
                        "notes": imported.notes,
                    },
                    code="",
                    version=version("unskew"),
                ),
                RunFinished(status="done", iterations=imported.iterations),
            ],
            actor="import",
        )
    finally:
        stream.close()
    return count


def _batches(events: Iterator[Telemetry]) -> Iterator[list[Telemetry]]:
    while batch := list(islice(events, _BATCH)):
        yield batch
