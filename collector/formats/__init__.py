"""Other tools' files, in and out: one module per format."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from unskew.collector.formats.imported import (
    FormatError,
    Imported,
    Source,
    Stored,
    fingerprint,
    run_name,
    store_run,
    stored_already,
)
from unskew.collector.paths import Store

__all__ = ["IMPORTERS", "FormatError", "Stored", "bring_in"]

IMPORTERS = {"straggler-analysis": "straggler_analysis"}
"""Format -> its module here; each has `read(path) -> Imported`, a pure reader."""


def bring_in(store: Store, format: str, path: Path, run: str | None = None) -> Stored:
    """Import `path` as a run of the store: all of it or nothing. The same content under the same name again changes nothing.

    Raises `FormatError` (a bad path or file) or `StoreError`.
    """
    if format not in IMPORTERS:
        raise FormatError(f"format {format!r} is not known; known are {', '.join(IMPORTERS)}")
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder")
    read: Callable[[Path], Imported] = import_module(f"unskew.collector.formats.{IMPORTERS[format]}").read
    sha256 = fingerprint(path)
    source = Source(run=run or run_name(path, sha256), format=format, path=path, sha256=sha256)
    already = stored_already(store, source)
    imported = read(path)
    count = 0 if already else store_run(store, source, imported)
    return Stored(
        run=source.run,
        format=format,
        source=str(path),
        ranks=imported.ranks,
        iterations=imported.iterations,
        events=count,
        already=already,
    )
