"""Checkpoints on disk: which are whole, and where each layer's part lies. ::

    checkpoints/<run>/<iterations>/rank-<rank>/    a part: some layers, in torch's distributed-checkpoint format
    checkpoints/<run>/<iterations>/index.json      written last: with it the checkpoint is whole

A folder without an index is a save that was cut short, or that goes on; one that lacks something of what its index names is
damaged, and passed over. The last `KEPT` whole ones stay; of a run that another
one goes on with, the last one, once that has `KEPT` of its own.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from unskew.collector.files.manifest import sync_folder
from unskew.collector.paths import Store
from unskew.collector.rights import open_file

KEPT = 2
FORMAT = 2
"""How a part holds its layers: each as one tensor. In 1 each parameter and moment was one, which nothing reads any more."""
_INDEX = "index.json"


class Slice(msgspec.Struct, frozen=True):
    """``[first / of, end / of)`` of a layer lies in the part of `rank` (analytics/shards/parts.py says what that is)."""

    rank: int
    first: int
    end: int
    of: int


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole checkpoint: the state after `iterations` iterations; layer i lies in the part of rank `writers[i]`, or, where a
    tensor-parallel group wrote it, in the slices ``slices[i]``. `files`: those of all parts, with their bytes at least (a part
    that is written again has more layers). `format`: see `FORMAT`."""

    format: int = 1
    iterations: int
    writers: tuple[int, ...]
    slices: dict[int, tuple[Slice, ...]] = {}
    files: dict[str, int] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of its parts."""
        of_groups = (one.rank for slices in self.slices.values() for one in slices)
        return tuple(map(part_name, sorted({*self.writers, *of_groups})))


class Checkpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint and its folder."""

    folder: Path
    index: CheckpointIndex

    def part(self, layer: int) -> Path:
        """Where a layer lies that no group wrote."""
        return self.folder / part_name(self.index.writers[layer])

    def slices(self, layer: int) -> dict[Path, Slice]:
        """Where the slices of a layer lie; one, the whole, where no group wrote it."""
        whole = (Slice(self.index.writers[layer], 0, 1, 1),)
        return {self.folder / part_name(one.rank): one for one in self.index.slices.get(layer, whole)}


def part_name(rank: int) -> str:
    """The folder of what a rank wrote, within its checkpoint's."""
    return f"rank-{rank:04d}"


def is_whole(folder: Path) -> bool:
    """Whether the checkpoint in a folder has its index."""
    return (folder / _INDEX).exists()


def seal(store: Store, run: str, index: CheckpointIndex) -> int:
    """Every part is on disk: from now on the checkpoint is whole, and what it replaces goes; how many there are then. Raises
    `OSError`."""
    folder = _folder(store, run, index.iterations)
    files = [path for part in index.parts for path in (folder / part).glob("*")]
    sizes = {str(one.relative_to(folder)): one.stat().st_size for one in files}
    index = msgspec.structs.replace(index, format=FORMAT, files=sizes)
    beside = folder / f"{_INDEX}.new"
    with os.fdopen(open_file(beside, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(msgspec.json.encode(index))
        file.flush()
        os.fsync(file.fileno())
    beside.rename(folder / _INDEX)
    sync_folder(folder)
    return prune(store, run, keep=KEPT)


def prune(store: Store, run: str, *, keep: int) -> int:
    """Remove what is older than the last `keep` whole checkpoints of a run; how many whole ones are left."""
    whole = [checkpoint.index.iterations for checkpoint in checkpoints(store, run)][-keep:]
    for entry in store.checkpoints(run).iterdir() if whole else ():
        if entry.name.isdigit() and int(entry.name) < whole[0]:
            shutil.rmtree(entry, ignore_errors=True)
    return len(whole)


def checkpoints(store: Store, run: str) -> list[Checkpoint]:
    """The whole checkpoints of a run, the oldest first."""
    found = []
    for path in _indexes(store, run):
        with suppress(OSError, msgspec.DecodeError):
            index = msgspec.json.decode(path.read_bytes(), type=CheckpointIndex)
            if all((path.parent / name).stat().st_size >= size for name, size in index.files.items()):
                found.append(Checkpoint(path.parent, index))
    return found


def damaged(store: Store, run: str) -> list[Path]:
    """The folders of checkpoints that were whole and are not any more."""
    whole = {one.folder for one in checkpoints(store, run)}
    return [path.parent for path in _indexes(store, run) if path.parent not in whole]


def _indexes(store: Store, run: str) -> list[Path]:
    return sorted(store.checkpoints(run).glob(f"*/{_INDEX}"))


def checkpoint_at(store: Store, run: str, iterations: int) -> Checkpoint:
    """One that is known to be there."""
    path = _folder(store, run, iterations)
    return Checkpoint(path, msgspec.json.decode((path / _INDEX).read_bytes(), type=CheckpointIndex))


def _folder(store: Store, run: str, iterations: int) -> Path:
    return store.checkpoints(run) / f"{iterations:08d}"
