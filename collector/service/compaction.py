"""Compaction: many small sealed files of a run become few large ones, with the same rows. Readers see one swap of the manifest.

A file as large as SMALL_ROWS is never written again, so a row is rewritten a few times at most. The old files stay for a while:
a reader that holds the manifest of before may be on its way to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import duckdb
import msgspec

from unskew.collector.files.manifest import Manifest, SealedFile, load, publish
from unskew.collector.files.rows import quoted
from unskew.collector.paths import Store, StoreError
from unskew.collector.projections.published import covers_of, tiers_of
from unskew.collector.service.sealing import extent, write_sorted

SMALL_ROWS = 500_000
MOST_ROWS = 1_000_000
MANY = 16
"""While a run goes on, its small files are merged when they make a large one, or are so many; two are when it is over."""


def due(manifest: Manifest, *, over: frozenset[str]) -> Iterator[tuple[SealedFile, ...]]:
    """The groups of small neighbours to merge; `over`: the runs that write no more.

    A published projection records up to which sealing it goes: no file may reach across that.
    """
    covers = covers_of(tiers_of(manifest))

    def owner(one: SealedFile) -> tuple[str, str]:
        return one.run, one.kind

    for (run, _), files in groupby(sorted(manifest.sealed, key=lambda one: (*owner(one), one.first)), key=owner):
        may = [one for one in files if not manifest.published or one.last <= covers.get(run, -1)]
        for group in _neighbours(may):
            worth = run in over or len(group) >= MANY or sum(one.rows for one in group) >= SMALL_ROWS
            if len(group) > 1 and worth:
                yield group


def merge(store: Store, database: duckdb.DuckDBPyConnection, group: Sequence[SealedFile]) -> list[Path]:
    """Merge the files of `group` (one run, one kind) and swap the manifest; the old files are returned, to be removed."""
    first, last = group[0].first, group[-1].last
    path = (store.root / group[0].file).with_name(f"{first:06d}-{last:06d}-{group[0].kind}.parquet")
    paths = ", ".join(quoted(str(store.root / one.file)) for one in group)
    source = f"(select * from read_parquet([{paths}], union_by_name = true))"
    about = extent(database, source)
    merged = msgspec.convert(
        {
            "run": group[0].run,
            "file": str(path.relative_to(store.root)),
            "sha256": write_sorted(database, source, path),
            "replaces": tuple(file for one in group for file in one.replaces),
            "kind": group[0].kind,
            "first": first,
            "last": last,
            **about,
        },
        SealedFile,
    )
    manifest, old = load(store), {one.file for one in group}
    if not old <= {one.file for one in manifest.sealed}:
        raise StoreError(f"{store.manifest} changed while files of run {group[0].run} were merged: only one may write it")
    kept = tuple(one for one in manifest.sealed if one.file not in old)
    sealed = tuple(sorted((*kept, merged), key=lambda one: one.last_pos))
    publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, sealed=sealed))
    return [store.root / file for file in old]


def _neighbours(files: Sequence[SealedFile]) -> Iterator[tuple[SealedFile, ...]]:
    """Runs of small files one behind the other, up to MOST_ROWS rows each."""
    group: list[SealedFile] = []
    for one in files:
        if group and (one.rows >= SMALL_ROWS or sum(held.rows for held in group) + one.rows > MOST_ROWS):
            yield tuple(group)
            group = []
        if one.rows < SMALL_ROWS:
            group.append(one)
    if group:
        yield tuple(group)
