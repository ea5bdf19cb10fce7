"""What every importer returns, how bad input is told, and how a whole run gets into a store at once.

An importer is a pure reader: a path in, `Imported` out, or a `FormatError` with one sentence: which file and line (or row),
what is wrong, what is allowed. `store_run` writes the events where nobody looks and moves the finished run into place by one
rename, so that a reader sees all of it or nothing.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.events import RunFinished, RunStarted, Telemetry
from unskew.collector.locks import hold
from unskew.collector.manifest import load
from unskew.collector.paths import Store, StoreError, checked_name, make_folder
from unskew.collector.reader import Reader
from unskew.collector.spool import ControlStream, SpoolWriter

_BATCH = 5_000
_DISK_PATIENCE_S = 60.0


class FormatError(ValueError):
    """A file that is not what it should be; the message is one sentence with file and line or row."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its source tells it. `facts`: what is true of the whole run; `iterations`: how many the source has."""

    events: Iterable[Telemetry]
    ranks: int
    iterations: int
    facts: dict[str, Any]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run comes from, and the name it gets; `sha256` is `fingerprint(path)`."""

    run: str
    format: str
    path: Path
    sha256: str


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """`already`: the same content was in the store under this name, and nothing was written."""

    run: str
    format: str
    source: str
    ranks: int
    iterations: int
    events: int
    already: bool = False


def source_files(path: Path, *suffixes: str) -> list[Path]:
    """`path` itself, or the files of that folder with one of the suffixes. Raises `FormatError` when there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FormatError(f"{path}: there is no such file or folder")
    found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(suffixes))
    if not found:
        raise FormatError(f"{path}: no file in this folder ends in {' or '.join(suffixes)}")
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


def run_name(path: Path, sha256: str) -> str:
    """A run's name when none is given: the file's, and the beginning of its content's hash."""
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.resolve().name.partition(".")[0]).strip("-._+") or "imported"
    return f"{stem}-{sha256[:8]}"


def stored_already(store: Store, source: Source) -> bool:
    """Whether the run holds just this content; False when there is no such run. Raises `FormatError` when it holds another."""
    run = checked_name("run", source.run)
    if run not in store.spooled_runs() and all(sealed.run != run for sealed in load(store).sealed):
        return False
    with Reader(store) as reader:
        known = reader.sql("select options->>'sha256' as sha256 from runs where run = ?", [run])
    if known["sha256"].to_list() == [source.sha256]:
        return True
    raise FormatError(f"run {run} is in {store.root} already and holds something else: choose another name with --run")


def store_run(store: Store, source: Source, imported: Imported) -> int:
    """Write a run whole; returns the number of events. Raises `StoreError` or, from the reading, `FormatError`.

    The clock of the run is "imported": times are the source's own. The log's wall clock (`at_us`) is the time of the import.
    """
    run = checked_name("run", source.run)
    lock = hold(store.lock(f"import-{run}"))
    if lock is None:
        raise StoreError(f"run {run} is being imported by another process")
    aside = store.root / "importing" / run
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of an import that was killed
        count = _write(Store(aside), source, imported)
        make_folder(store.root / "spool")
        try:
            (aside / "spool" / run).rename(store.spool(run))
        except OSError as error:
            raise StoreError(f"cannot put run {run} into {store.root}: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()
    return count


def _write(aside: Store, source: Source, imported: Imported) -> int:
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
