"""A rank's side of checkpoints: what is whole is never touched again, and what was given is waited for."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from unskew.analytics.shards.parts import Part
from unskew.collector.files.checkpoints import CheckpointIndex, checkpoint_at, part_name, seal
from unskew.collector.paths import Store
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.protocol import CheckpointPart
from unskew.runtime.rank.checkpoint import CheckpointWriter, UnreadableCheckpoint, restore
from unskew.runtime.size import ModelSize

# As in a rank (checkpoint.py): no process group is there, by intent.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SIZE = ModelSize(n_layers=3, dim=8, heads=1)


def layer(number: int, seed: int = 0) -> HeldLayer:
    return HeldLayer(SIZE, number, seed=seed, dtype=torch.float32, device=torch.device("cpu"))


def other(number: int, part: Part | None) -> HeldLayer:  # noqa: ARG001 - what is restored into
    return layer(number, seed=1)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What is there, and which files: one that is written anew is another."""
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_step_that_is_taken_again_leaves_a_whole_checkpoint_and_adds_to_one_that_is_not(tmp_path: Path) -> None:
    store, reports = Store(tmp_path), list[CheckpointPart]()
    writer, layers = CheckpointWriter(store.checkpoints("r"), 0, reports.append), {number: layer(number) for number in range(3)}
    writer.save(5, layers, [0])
    writer.finish(60)
    writer.save(5, layers, [0])  # the same once more: nothing to do
    writer.save(5, layers, [1, 2])  # a replica has gone, and its layers are this rank's to write now
    writer.finish(60)
    assert [one.problem for one in reports] == ["", ""]
    assert [one.layers for one in reports] == [(0,), (0, 1, 2)]
    seal(store, "r", CheckpointIndex(iterations=5, writers=(0, 0, 0)))
    for number in range(3):
        restored = restore(checkpoint_at(store, "r", 5), number, None, partial(other, number))
        assert torch.equal(restored.pack(), layers[number].pack())
    before = content(store.checkpoints("r") / "00000005")
    CheckpointWriter(store.checkpoints("r"), 0, reports.append).save(5, layers, [0, 1])
    time.sleep(0.5)
    assert content(store.checkpoints("r") / "00000005") == before
    assert len(reports) == 2


def test_what_could_not_be_written_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[CheckpointPart] = []
    writer = CheckpointWriter(tmp_path, 0, reports.append)
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
        writer.save(5, {0: layer(0)}, [0])
        writer.finish(60)
    writer.save(5, {0: layer(0)}, [0])
    writer.finish(60)
    assert [one.problem for one in reports] == ["OSError: No space left on device", ""]
    assert [path.name for path in (tmp_path / "00000005").iterdir()] == [part_name(0)]


def test_what_is_not_as_it_was_written_is_named_with_its_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = CheckpointWriter(store.checkpoints("r"), 0, lambda _: None)
    writer.save(5, {0: layer(0)}, [0])
    writer.finish(60)
    seal(store, "r", CheckpointIndex(iterations=5, writers=(0,)))
    checkpoint = checkpoint_at(store, "r", 5)
    for file in checkpoint.part(0).glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UnreadableCheckpoint, match=f"rank-0000 cannot be read .*: remove {checkpoint.folder} to go on"):
        restore(checkpoint, 0, None, partial(other, 0))
