"""Checkpoints, a rank's side: its layers are copied between two iterations and written by a thread while training goes on.

Of a layer's holders one writes it, so each rank writes its share, as a part of its own in torch's distributed-checkpoint
format: per layer one tensor, its parameters in their order and then both moments (`HeldLayer.saved`), for that format takes
0.23 ms of a core a tensor, which training waits for where it has no other; a layer that trains nothing has none. Whoever holds
a layer in whatever plan reads it from the part that the checkpoint's index names; a layer that is cut is written by a group
together, and read from those parts that have something of what is wanted.

torch.distributed.checkpoint is imported where it is used: a second of work, that the zygote does for all ranks (zygote.py) of a
run that needs it, with a first save, which takes some 40 ms of a core longer than the next.
"""

from __future__ import annotations

import gc
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from unskew.analytics.core.plan import Plan
from unskew.analytics.shards.parts import WHOLE, Part, common, part_of
from unskew.collector.files.checkpoints import Checkpoint, is_whole, part_name
from unskew.collector.rights import make_folder
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.protocol import CheckpointPart

State = dict[str, Tensor]

# No process group is registered, by intent: each rank writes by itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def to_write(plan: Plan, rank: int) -> list[int]:
    """The layers that `rank` writes: each is written by one of its holders in turn, a rank or a group."""
    groups = set(plan.teams)
    written = []
    for layer in plan.role_of[rank].layers:
        parts = plan.parts_of(layer)
        holders = sorted(
            [*((one,) for one, part in parts.items() if part is None), *(g for g in groups if set(g) <= parts.keys())]
        )
        if rank in holders[layer % len(holders)]:
            written.append(layer)
    return written


class UnreadableCheckpoint(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """A part of the checkpoint that a run goes on with is not what was written: no rank can begin."""


def warm_up() -> None:
    """Write what nobody reads, so that whoever is forked from this process writes its first as fast as those behind it.

    Not where torch can use a GPU: a save asks for it, and no fork of a process that did can use it."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - see above
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return
    with suppress(Exception, CheckpointException), TemporaryDirectory(prefix="unskew-first-save-") as folder:
        save({_name(0): torch.zeros(1)}, checkpoint_id=folder, no_dist=True)


class CheckpointWriter:
    """Writes what it is given to `folder`, one checkpoint after the other; `report` hears of each, from the thread."""

    def __init__(self, folder: Path, rank: int, report: Callable[[CheckpointPart], None]) -> None:
        self._folder, self._rank, self._report = folder, rank, report
        self._waiting: queue.Queue[tuple[int, State, tuple[int, ...], Part, int]] = queue.Queue(1)
        self._given: tuple[int, frozenset[int]] = (-1, frozenset())
        """The last one that it was given: after how many iterations, and which layers."""
        threading.Thread(target=self._serve, name="checkpoint", daemon=True).start()

    def save(self, iterations: int, layers: Mapping[int, HeldLayer], numbers: Iterable[int]) -> None:
        """Copy layers as they are after so many iterations, to be written. While the disk is still busy with the one before the
        next, this one is left out.

        Where a step is taken again, and other ranks are left, the same rank may write other layers of the same checkpoint: then
        it writes those too that it has reported."""
        start_ns = time.monotonic_ns()
        before = self._given[1] if self._given[0] == iterations else frozenset()
        wanted = before.union(numbers)
        if self._waiting.full() or wanted == before:
            return
        self._given, numbers = (iterations, wanted), tuple(sorted(wanted))
        part = next((layers[number].part for number in numbers), None) or WHOLE
        state = {_name(number): layers[number].saved() for number in numbers if layers[number].parameters}
        self._waiting.put((iterations, state, numbers, part, (time.monotonic_ns() - start_ns) // 1000))

    def finish(self, within_s: float) -> None:
        """Wait until what was given is on disk, at most so long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, within_s)

    def _serve(self) -> None:
        from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - see above
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

        while True:
            iterations, state, numbers, held, paused_us = self._waiting.get()
            started, problem = time.monotonic(), ""
            path = self._folder / f"{iterations:08d}" / part_name(self._rank)
            beside, old = (path.with_name(f"{path.name}.{which}") for which in ("new", "old"))
            try:
                make_folder(path.parent)
                if is_whole(path.parent):  # what is whole is never touched again
                    del state
                    self._waiting.task_done()
                    continue
                save(state, checkpoint_id=beside, no_dist=True)
                if path.exists():
                    path.rename(old)
                beside.rename(path)
                shutil.rmtree(old, ignore_errors=True)
            except (Exception, CheckpointException) as raised:  # a full disk costs the checkpoint, never the rank
                shutil.rmtree(beside, ignore_errors=True)  # the log needs the place more
                self._given = (-1, frozenset())
                problem = _cause(raised)
            part = CheckpointPart(
                rank=self._rank,
                iterations=iterations,
                layers=numbers,
                bytes=sum(tensor.nbytes for tensor in state.values()),
                seconds=time.monotonic() - started,
                paused_us=paused_us,
                problem=problem,
                part=(held.first, held.end, held.of),
            )
            del state
            # A rank's collector is off; the planner leaves circles behind, some 20 objects a tensor, all of them new.
            gc.collect(0)
            self._report(part)
            self._waiting.task_done()


def restore(checkpoint: Checkpoint, number: int, part: Part | None, make: Callable[..., HeldLayer]) -> HeldLayer:
    """A part of a layer from what is there of it; `make` makes the place for any `part`.
    Raises `UnreadableCheckpoint`."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - see above
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    layer = make(part=part)
    if not layer.parameters:
        layer.stepped(checkpoint.index.iterations)
        return layer
    for path, one in checkpoint.slices(number).items():
        stored = part_of(one.first, one.end, one.of)
        piece = common(number, stored, part)
        if piece.low == piece.high:
            continue
        held = layer if stored == part else make(part=stored)
        flat = held.room_for()
        try:
            load({_name(number): flat}, checkpoint_id=path, no_dist=True)
        except (Exception, CheckpointException) as raised:
            again = f"remove {checkpoint.folder} to go on from the checkpoint before it"
            raise UnreadableCheckpoint(f"{path} cannot be read ({_cause(raised)}): {again}") from raised
        held.unpack(flat)
        if held is not layer:
            layer.copy_from(held, piece)
    layer.stepped(checkpoint.index.iterations)
    return layer


def _cause(raised: BaseException) -> str:
    """Of what torch raised, which is no `Exception` and has the error within."""
    error = next((one for one, _ in getattr(raised, "failures", {}).values()), raised)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _name(layer: int) -> str:
    return f"layers.{layer}"
