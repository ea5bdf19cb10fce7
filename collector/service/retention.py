"""Retention: old telemetry goes in whole sealed files; control events stay for ever, and so do the projections made before."""

from __future__ import annotations

from pathlib import Path

import msgspec

from unskew.collector.files.manifest import Manifest, PrunedRange, SealedFile, publish, sync_folder
from unskew.collector.files.segment import segment_name
from unskew.collector.paths import Store
from unskew.collector.projections.published import covers_of, tiers_of


def due(manifest: Manifest, *, older_than_us: int) -> tuple[SealedFile, ...]:
    """The telemetry files in which every row was written before `older_than_us` (wall clock).

    Only up to what the published projections cover, when there are any: nothing else holds what they hold of pruned rows.
    """
    covers = covers_of(tiers_of(manifest))  # of all tiers: each names the runs alone that it has rows of
    return tuple(
        one
        for one in manifest.sealed
        if one.kind == "telemetry"
        and one.last_at_us is not None
        and one.last_at_us < older_than_us
        and (not manifest.published or one.last <= covers.get(one.run, -1))
    )


def prune(store: Store, manifest: Manifest, files: tuple[SealedFile, ...]) -> list[Path]:
    """Take `files` out of the manifest, which remembers what went; they are returned, to be removed.

    A run that goes on has the spool files still that were sealed in them. These go first: a manifest that names them no more
    would have them sealed once more, and counted twice in what was published.
    """
    spool = [store.spool(one.run) / of.writer / segment_name(of.segment) for one in files for of in one.replaces]
    still = [path for path in spool if path.exists()]
    for path in still:
        path.unlink()
    for folder in {path.parent for path in still}:
        sync_folder(folder)
    gone = {one.file for one in files}
    pruned = tuple(
        PrunedRange(
            run=one.run, first=one.first, last=one.last, rows=one.rows, last_pos=one.last_pos, last_at_us=one.last_at_us
        )
        for one in files
    )
    kept = tuple(one for one in manifest.sealed if one.file not in gone)
    fresh = msgspec.structs.replace(manifest, number=manifest.number + 1, sealed=kept, pruned=(*manifest.pruned, *pruned))
    publish(store, fresh)
    return [store.root / file for file in gone]
