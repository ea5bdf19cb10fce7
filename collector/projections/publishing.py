"""Publishing: what was sealed since is aggregated once, and the files it becomes are merged so that there are always few.

A new tier absorbs the ones before it while they are at most `ABSORB` times its size, so sizes grow geometrically: n sealings
leave about log(n) tiers, and each row is written about log(n) times (the size-tiered merge of log-structured stores).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from unskew.collector.files.manifest import Manifest, PublishedFile, SealedFile
from unskew.collector.files.rows import quoted
from unskew.collector.paths import Store, StoreError
from unskew.collector.projections.definitions import CODE, PROJECTIONS, Projection
from unskew.collector.projections.published import (
    FOLDER,
    ProjectionTier,
    covers_of,
    file_of,
    parquet,
    published_state,
    tiers_of,
)
from unskew.collector.rights import mode_of_files

if TYPE_CHECKING:
    import duckdb

ABSORB = 2
ROW_GROUP_ROWS = 50_000


def publish(connection: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> tuple[PublishedFile, ...]:
    """The published files for `manifest`: the old ones with what was sealed since, all anew when other code made them.

    Writes files that no manifest lists yet; the caller swaps it. A cut in between leaves files that nobody reads.
    """
    now = published_state(manifest)
    if not now.tiers:
        return rebuild(connection, store, manifest)
    return _fold(connection, store, now.tiers, now.open, {})


def rebuild(connection: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> tuple[PublishedFile, ...]:
    """All projections made anew from the sealed files.

    Runs whose telemetry was pruned keep the rows that were published of them, as far as their columns are the same today:
    nothing else is left of it. Raises `StoreError` when such a file is damaged.
    """
    pruned = {one.run for one in manifest.pruned}
    for sentence in damaged_files(store, manifest) if pruned else ():
        raise StoreError(f"{sentence}, and nothing else is left of what was pruned: put it back from a copy of the store")
    old = tiers_of(manifest)
    kept = {run: last for run, last in covers_of(old).items() if run in pruned}
    seeds = {name: seed for name in PROJECTIONS if (seed := _seed(connection, store, old, name, set(kept)))}
    sealed = [one for one in manifest.sealed if one.first > kept.get(one.run, -1)]
    number = 1 + max((tier.number for tier in old), default=-1)
    return _fold(connection, store, (), sealed, kept, seeds=seeds, number=number)


def damaged_files(store: Store, manifest: Manifest) -> list[str]:
    """The published files that are not what was written."""
    return [
        f"{entry.file} is damaged: its sha256 is not the manifest's"
        if (store.root / entry.file).is_file()
        else f"{entry.file} is gone, its sha256 cannot be compared"
        for entry in manifest.published
        if not (store.root / entry.file).is_file() or _digest(store, entry.file) != entry.sha256
    ]


def check(connection: duckdb.DuckDBPyConnection, store: Store, manifest: Manifest) -> list[str]:
    """What is wrong with the published files, one sentence each: damage, or rows that the sealed files do not give."""
    damaged = damaged_files(store, manifest)
    now = published_state(manifest)
    if damaged or not now.tiers:
        return damaged
    pruned = {one.run for one in manifest.pruned}
    whole = [one.file for one in manifest.sealed if one not in now.open and one.run not in pruned]
    left_out = f"list_contains([{', '.join(map(quoted, sorted(pruned)))}]::varchar[], run)"
    found = []
    for name, projection in PROJECTIONS.items():
        published = f"(select * from ({projection.merge(f'({now.relation(store, name)})')}) where not {left_out})"
        raw = (
            f"({projection.merge(f'({projection.partial(parquet(store, whole))})')})"
            if whole
            else f"(select * from {published} limit 0)"
        )
        raw = f"(select {_columns(connection.sql(f'from {published}').columns)} from {raw})"
        query = (
            f"select (select count(*) from (from {published} except all from {raw}))"
            f" + (select count(*) from (from {raw} except all from {published}))"
        )
        (different,) = connection.sql(query).fetchall()[0]
        if different:
            found.append(f"projection {name}: {different} rows differ from what the sealed files give")
    return found


def _fold(
    connection: duckdb.DuckDBPyConnection,
    store: Store,
    tiers: tuple[ProjectionTier, ...],
    sealed: Iterable[SealedFile],
    covers: dict[str, int],
    *,
    seeds: dict[str, str] | None = None,
    number: int = 0,
) -> tuple[PublishedFile, ...]:
    """`tiers` and one more for the sealed files (and `seeds`), with as many of the last absorbed as are not much larger."""
    fresh = list(sealed)
    if not fresh and not seeds:
        return _entries(tiers)
    covers = dict(covers)
    for one in fresh:
        covers[one.run] = max(one.last, covers.get(one.run, -1))
    new = {name: _collect(connection, store, one, fresh, (seeds or {}).get(name)) for name, one in PROJECTIONS.items()}
    try:
        rows = sum(connection.sql(f"select count(*) from {table}").fetchall()[0][0] for table in new.values())
        kept, absorbed = list(tiers), list[ProjectionTier]()
        while kept and kept[-1].rows <= ABSORB * rows:
            absorbed.append(kept.pop())
            rows += absorbed[-1].rows
        covers = covers_of(tuple(absorbed)) | covers
        number = max([number, *(tier.number + 1 for tier in tiers)])
        store.make(store.root / FOLDER)
        entries = {}
        for name, table in new.items():
            source = f"select * from {table}"
            if absorbed:
                source += f" union all by name select * from {parquet(store, [tier.entries[name].file for tier in absorbed])}"
            file = file_of(number, name)
            count, digest = _write(connection, store.root / file, PROJECTIONS[name], f"({source})")
            entries[name] = PublishedFile(name=name, file=file, rows=count, sha256=digest, code=CODE, covers=covers)
        return _entries((*kept, ProjectionTier(number, entries)))
    finally:
        for table in new.values():
            connection.execute(f"drop table if exists {table}").fetchall()


def _entries(tiers: Iterable[ProjectionTier]) -> tuple[PublishedFile, ...]:
    return tuple(entry for tier in tiers for entry in tier.entries.values())


def _collect(
    connection: duckdb.DuckDBPyConnection, store: Store, projection: Projection, sealed: list[SealedFile], seed: str | None
) -> str:
    """A temporary table with the projection of these sealed files."""
    table = f"temp.new_{projection.name}"
    source = parquet(store, [one.file for one in sealed]) if sealed else "(select * from log limit 0)"
    query = projection.partial(source) + (f" union all by name {seed}" if seed else "")
    connection.execute(f"create or replace temp table new_{projection.name} as {query}").fetchall()
    return table


def _seed(
    connection: duckdb.DuckDBPyConnection, store: Store, tiers: tuple[ProjectionTier, ...], name: str, runs: set[str]
) -> str | None:
    """The published rows of `runs`, those columns that the projection still has."""
    files = [tier.entries[name].file for tier in tiers if name in tier.entries]
    if not files or not runs:
        return None
    old = parquet(store, files)
    today = connection.sql(f"{PROJECTIONS[name].partial('log')} limit 0").columns
    held = set(connection.sql(f"select * from {old} limit 0").columns)
    listed = ", ".join(map(quoted, sorted(runs)))
    return f"select {_columns([one for one in today if one in held])} from {old} where run in ({listed})"


def _write(connection: duckdb.DuckDBPyConnection, path: Path, projection: Projection, source: str) -> tuple[int, str]:
    """The projection of `source` in a file that is on disk before it has its name; its rows and sha256."""
    fresh = path.with_suffix(".new")
    connection.execute(
        f"copy (select * from ({projection.merge(source)}) order by {projection.order}) "
        f"to {quoted(str(fresh))} (format parquet, compression zstd, row_group_size {ROW_GROUP_ROWS})"
    ).fetchall()
    (count,) = connection.sql(f"select count(*) from read_parquet({quoted(str(fresh))})").fetchall()[0]
    with fresh.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
    fresh.chmod(mode_of_files(path.parent) & 0o444)
    fresh.replace(path)
    return count, digest


def _digest(store: Store, file: str) -> str:
    with (store.root / file).open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def _columns(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
