"""The manifest: which sealed files exist and which spool files each replaces. Swapped atomically, so a reader sees one state.

Every row is visible in exactly one form: in a sealed file of the manifest, or in a spool file that the manifest does not name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from unskew.collector.paths import Store, StoreError, checked_name


class SealedSpool(msgspec.Struct, frozen=True, kw_only=True):
    """A spool file that is final and whole in a sealed file."""

    writer: str
    segment: int
    bytes: int
    rows: int
    last_seq: int


Kind = Literal["telemetry", "control", "all"]
"""Which class of events a sealed file holds: the unit of retention. "all" was written before the classes were kept apart."""


class SealedFile(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable Parquet file; `file` is relative to the store, `last_pos` the highest ingest position in it.

    Each sealing of a run has a number, counted from 0; the file holds those from `first` to `last` (several when compacted) of
    its `kind`. `first_iteration` and so on are the least and greatest in it, by which a query names the files that can answer
    it; None = no row has one, or a manifest from before.
    """

    run: str
    file: str
    rows: int
    sha256: str
    last_pos: int
    replaces: tuple[SealedSpool, ...]
    kind: Kind = "all"
    first: int = -1
    last: int = -1
    first_iteration: int | None = None
    last_iteration: int | None = None
    first_at_us: int | None = None
    last_at_us: int | None = None


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A projection as an immutable Parquet file, relative to the store.

    `code` hashes the code that made it; `covers`: run -> the highest sealing whose rows are in it (readers add what is newer).
    """

    name: str
    file: str
    rows: int
    sha256: str
    code: str
    covers: dict[str, int]


class PrunedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry that retention dropped: the rows of sealings `first` to `last` of a run, none newer than `last_at_us`."""

    run: str
    first: int
    last: int
    rows: int
    last_pos: int
    last_at_us: int | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`number` grows with every swap; `problems` are sentences about what the collector found wrong while sealing."""

    number: int = 0
    sealed: tuple[SealedFile, ...] = ()
    problems: tuple[str, ...] = ()
    published: tuple[PublishedFile, ...] = ()
    pruned: tuple[PrunedRange, ...] = ()

    def next_sealing(self, run: str) -> int:
        """The number that the run's next sealing gets."""
        held = [one.last for one in self.sealed if one.run == run] + [one.last for one in self.pruned if one.run == run]
        return max(held, default=-1) + 1

    @property
    def next_pos(self) -> int:
        """The ingest position that the next row gets."""
        last = [one.last_pos for one in self.sealed] + [one.last_pos for one in self.pruned]
        return 1 + max(last, default=-1)

    def replaced(self, run: str) -> Iterator[tuple[SealedFile, SealedSpool]]:
        """Every spool file of `run` that readers must not read any more, with its sealed file."""
        for sealed in self.sealed:
            if sealed.run == run:
                for replaced in sealed.replaces:
                    yield sealed, replaced

    def without_names(self, spooled: Collection[str]) -> Manifest:
        """The next manifest, in which only the runs in `spooled` name their spool files; of the others these are gone.

        Of each control stream the last name stays: it gives the stream's version.
        """
        last: dict[tuple[str, str], SealedSpool] = {}
        for sealed in self.sealed:
            for file in sealed.replaces:
                stream = (sealed.run, file.writer.partition("@")[2])
                if stream[1] and (stream not in last or file.last_seq > last[stream].last_seq):
                    last[stream] = file
        needed = {(run, file) for (run, _), file in last.items()}
        smaller = tuple(
            msgspec.structs.replace(
                sealed,
                replaces=tuple(one for one in sealed.replaces if sealed.run in spooled or (sealed.run, one) in needed),
            )
            for sealed in self.sealed
        )
        return msgspec.structs.replace(self, number=self.number + 1, sealed=smaller)


_parsed: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
"""What each manifest held when it was last read, and the file it was then: (mtime in ns, inode, size)."""


def load(store: Store) -> Manifest:
    """The manifest as published; empty when there is none yet. Raises `StoreError` when it is not a manifest, or was lost."""
    known = _read(store)
    if known is None and _has_sealed(store):
        known = _read(store)  # it was just begun, or is lost
        if known is None:
            raise StoreError(
                f"{store.manifest} is gone, and it alone names which files in {store.root / 'sealed'} are the log: "
                "put it back from a copy of the store; nothing is read or written until then"
            )
    return known or Manifest()


def _has_sealed(store: Store) -> bool:
    return next((store.root / "sealed").glob("*/*.parquet"), None) is not None


def begin(store: Store) -> None:
    """Publish an empty manifest unless there is one: before the first sealed file, so that a lost one is known as that."""
    if not store.manifest.exists():
        publish(store, load(store))


def _read(store: Store) -> Manifest | None:
    try:
        with open(store.manifest, "rb", opener=_regular) as file:
            status = os.fstat(file.fileno())
            version = (status.st_mtime_ns, status.st_ino, status.st_size)
            known = _parsed.get(store.manifest)
            if known is None or known[0] != version:
                known = _parsed[store.manifest] = version, _numbered(_within(store, _decode(file.read())))
            return known[1]
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(
            f"{store.manifest} is not a manifest ({error}); sealed files lie in {store.root / 'sealed'}"
        ) from error


class _ManifestFile(msgspec.Struct, forbid_unknown_fields=True):
    """The manifest's file: the manifest and the checksum of its bytes."""

    sha256: str
    manifest: msgspec.Raw


def _decode(data: bytes) -> Manifest:
    """Raises ValueError when `data` is not what `publish` wrote."""
    if data.startswith(b'{\n "number"'):  # from before manifests had a checksum
        return msgspec.json.decode(data, type=Manifest)
    file = msgspec.json.decode(data, type=_ManifestFile)
    if hashlib.sha256(file.manifest).hexdigest() != file.sha256:
        raise ValueError("its checksum is of other bytes")
    return msgspec.json.decode(file.manifest, type=Manifest)


def _within(store: Store, manifest: Manifest) -> Manifest:
    """`manifest`, when it names files of its store alone: what it names is read, and removed. Raises ValueError."""
    for one in manifest.sealed:
        _check_name(store, one.file, "sealed", checked_name("run", one.run))
        for replaced in one.replaces:
            checked_name("writer", replaced.writer)
    for entry in manifest.published:
        _check_name(store, entry.file, "published")
    named = [one.file for one in manifest.sealed] + [entry.file for entry in manifest.published]
    for folder in {(store.root / file).parent for file in named}:
        if folder.is_symlink() or folder.parent.is_symlink():
            raise ValueError(f"{folder} is a link")
    return manifest


def _check_name(store: Store, file: str, *folders: str) -> None:
    *inside, name = file.split("/")
    checked_name("file", name)
    if tuple(inside) != folders:
        raise ValueError(f"it names {file!r}, allowed: files in {'/'.join(folders)}")
    with suppress(OSError):  # one that is gone is damage, and named as that
        mode = (store.root / file).lstat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{file} is a link" if stat.S_ISLNK(mode) else f"{file} is not a regular file")


def _numbered(manifest: Manifest) -> Manifest:
    """Sealed files from before sealings had numbers get those of their order."""
    if all(one.last >= 0 for one in manifest.sealed):
        return manifest
    counted: Counter[str] = Counter()
    sealed = []
    for one in manifest.sealed:
        sealed.append(msgspec.structs.replace(one, first=counted[one.run], last=counted[one.run]) if one.last < 0 else one)
        counted[one.run] = sealed[-1].last + 1
    return msgspec.structs.replace(manifest, sealed=tuple(sealed))


def publish(store: Store, manifest: Manifest) -> None:
    """Swap the manifest: on disk before the name changes."""
    fresh = store.manifest.with_suffix(".new")
    with fresh.open("wb") as file:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        file.write(b'{"sha256": "%b",\n"manifest": %b}\n' % (hashlib.sha256(body).hexdigest().encode(), body))
        file.flush()
        os.fsync(file.fileno())
    if (store.root / "published").is_dir():
        sync_folder(store.root / "published")  # what it names is there under its name first
    fresh.replace(store.manifest)
    sync_folder(store.root)


def _regular(path: str, flags: int) -> int:
    """A descriptor to read a manifest by; what would make the reader wait, a FIFO say, gives no data."""
    return os.open(path, flags | os.O_NONBLOCK)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
