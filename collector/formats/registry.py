"""Other tools' files, in and out: one module per format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from unskew.collector.formats.imported import (
    FormatError,
    ImportedRun,
    ImportResult,
    Source,
    fingerprint,
    run_name,
    store_runs,
    stored_already,
)
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader

__all__ = ["EXPORTERS", "IMPORTERS", "FormatError", "ImportResult", "bring_in", "take_out"]

IMPORTERS = ("straggler-analysis", "kineto", "torchtitan", "iteration-times", "megatron", "mlperf", "flight-recorder")
"""Each has its module in importers/, with `read(path) -> Sequence[ImportedRun]`, a pure reader."""

EXPORTERS = ("straggler-analysis", "kineto", "perfetto", "otlp", "parquet", "prometheus")
"""Each has its module in exporters/, with `write(reader, run, path) -> str`, which returns a sentence on what it wrote."""

FOLDERS = ("kineto", "parquet")
"""Exporters that write several files: `path` is a new folder."""


def _module(side: str, format: str) -> ModuleType:
    return import_module(f"unskew.collector.formats.{side}.{format.replace('-', '_')}")


def bring_in(store: Store, format: str, path: Path, run: str | None = None) -> list[ImportResult]:
    """Import `path` as runs of the store (most sources are one run): all of it or nothing.

    The same content under the same name again changes nothing. Raises `FormatError` (a bad path or file) or `StoreError`.
    """
    if format not in IMPORTERS:
        raise FormatError(f"format {format!r} is not known; known are {', '.join(IMPORTERS)}")
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder")
    if not path.is_file() and not path.is_dir():
        raise FormatError(f"{path}: a file or a folder is needed here, not a pipe or a device")
    if not str(path).isprintable():
        raise FormatError(f"{str(path)!r}: the log cannot hold this name, rename the file")
    read: Callable[[Path], Sequence[ImportedRun]] = _module("importers", format).read
    sha256 = fingerprint(path)
    runs = [
        (Source(run=run_name(path, sha256, run, imported.name), format=format, path=path, sha256=sha256), imported)
        for imported in read(path)
    ]
    names = [source.run for source, _ in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{path}: two of its runs would both be named {twice}")
    already = stored_already(store, [source for source, _ in runs])
    fresh = [one for one in runs if one[0].run not in already]
    counts = dict(zip((source.run for source, _ in fresh), store_runs(store, fresh), strict=True))
    return [
        ImportResult(
            run=source.run,
            format=format,
            source=str(path),
            ranks=imported.ranks,
            iterations=imported.iterations,
            events=counts.get(source.run, 0),
            already=source.run in already,
            notes=imported.notes,
        )
        for source, imported in runs
    ]


def take_out(store: Store, format: str, run: str, path: Path) -> str:
    """Write a run of the store to `path`; returns a sentence on what is in it. Raises `FormatError` when the run has no
    such form.

    A file is swapped in whole: what was there stays when the export fails or is killed. A folder must be new.
    """
    write: Callable[[Reader, str, Path], str] = _module("exporters", format).write
    with Reader(store) as reader:
        if format in FOLDERS:
            return _new_folder(path, lambda aside: write(reader, run, aside))
        if path.exists() and not path.is_file():  # a pipe or a device is no file to replace
            return write(reader, run, path)
        place = path.resolve()
        aside = place.with_name(f".{place.name}.{os.getpid()}.new")
        try:
            what = write(reader, run, aside)
            aside.replace(place)
        finally:
            aside.unlink(missing_ok=True)
        return what


def _new_folder(path: Path, fill: Callable[[Path], str]) -> str:
    """Fill a folder, whole or not at all."""
    if path.exists():
        raise FormatError(f"{path} exists already: name a folder that does not")
    aside = path.with_name(f".{path.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        what = fill(aside)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return what
