"""Which published files of a manifest a reader may build on, and which sealed rows they hold already."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from unskew.collector.files.manifest import Manifest, PublishedFile, SealedFile
from unskew.collector.files.rows import quoted
from unskew.collector.paths import Store
from unskew.collector.projections.definitions import CODE, PROJECTIONS

FOLDER = "published"


class ProjectionTier(msgspec.Struct, frozen=True):
    """One file per projection, all of the same sealings: what was folded in one go. Files are named ``<number>-<name>``."""

    number: int
    entries: dict[str, PublishedFile]

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.entries.values())

    @property
    def covers(self) -> dict[str, int]:
        return next(iter(self.entries.values())).covers


class PublishedState(msgspec.Struct, frozen=True):
    """`tiers`: what holds; `covers`: run -> the highest sealing in them; `open`: the sealed files that are not in them."""

    tiers: tuple[ProjectionTier, ...]
    covers: dict[str, int]
    open: tuple[SealedFile, ...]

    def relation(self, store: Store, name: str) -> str:
        """The published rows of a projection as a SELECT; only when there are tiers."""
        return f"select * from {parquet(store, [tier.entries[name].file for tier in self.tiers])}"


def published_state(manifest: Manifest) -> PublishedState:
    """Files made by this code, whole tiers only. Anything else is as good as absent: then every sealed file is open."""
    tiers = tiers_of(manifest)
    covers = covers_of(tiers)
    whole = all(
        set(tier.entries) == set(PROJECTIONS)
        and all(entry.code == CODE and entry.covers == tier.covers for entry in tier.entries.values())
        for tier in tiers
    )
    straddles = any(sealed.first <= covers.get(sealed.run, -1) < sealed.last for sealed in manifest.sealed)
    if not tiers or not whole or straddles:
        return PublishedState((), {}, manifest.sealed)
    return PublishedState(tiers, covers, tuple(one for one in manifest.sealed if one.first > covers.get(one.run, -1)))


def tiers_of(manifest: Manifest) -> tuple[ProjectionTier, ...]:
    """All published files by tier, oldest first, whatever code made them."""
    numbered: defaultdict[int, dict[str, PublishedFile]] = defaultdict(dict)
    for entry in manifest.published:
        numbered[number_of(entry)][entry.name] = entry
    return tuple(ProjectionTier(number, numbered[number]) for number in sorted(numbered))


def covers_of(tiers: tuple[ProjectionTier, ...]) -> dict[str, int]:
    """Run -> the highest sealing whose rows are in `tiers`."""
    covers: dict[str, int] = {}
    for tier in tiers:
        for entry in tier.entries.values():
            for run, last in entry.covers.items():
                covers[run] = max(last, covers.get(run, -1))
    return covers


def number_of(entry: PublishedFile) -> int:
    return int(entry.file.rpartition("/")[2].partition("-")[0])


def file_of(number: int, name: str) -> str:
    return f"{FOLDER}/{number:06d}-{name}.parquet"


def parquet(store: Store, files: list[str]) -> str:
    """`read_parquet` of these files of the store."""
    return f"read_parquet([{', '.join(quoted(str(store.root / file)) for file in files)}])"
