"""Checkpoints, the controller's side, and the agent's while there is none: one is whole when a writer of every layer has
reported."""

from __future__ import annotations

import msgspec

from unskew.analytics.shards.parts import Part, make_whole
from unskew.collector.events import CheckpointSaved, Note
from unskew.collector.files.checkpoints import KEPT, CheckpointIndex, Slice, prune, seal
from unskew.collector.paths import Store
from unskew.runtime.options import ResumePoint
from unskew.runtime.protocol import CheckpointPart


class CheckpointKeeper:
    """Makes the parts of `run` whole checkpoints in `store`; `before`: what it goes on with."""

    def __init__(self, store: Store, run: str, n_layers: int, *, before: ResumePoint | None = None) -> None:
        self._store, self._run, self._parts, self._before = store, run, CheckpointParts(n_layers), before

    def take(self, part: CheckpointPart) -> CheckpointSaved | Note | None:
        """A rank's word on its part; what to log of it."""
        if part.problem:
            return self._failed(part.iterations, f"rank {part.rank}: {part.problem}")
        self._parts, whole = self._parts.take(part)
        if whole is None:
            return None
        index, saved = whole
        try:
            there = seal(self._store, self._run, index)
            if self._before is not None and there >= KEPT:
                prune(self._store, self._before.run, keep=1)
        except OSError as error:
            return self._failed(index.iterations, str(error))
        return saved

    def _failed(self, iterations: int, why: str) -> Note:
        return Note(text=f"the checkpoint after {iterations} iterations could not be written: {why}", by="controller")


class CheckpointParts(msgspec.Struct, frozen=True):
    """The parts that came of checkpoints that are not whole yet, by their iterations."""

    n_layers: int
    parts: dict[int, tuple[CheckpointPart, ...]] = {}

    def take(self, part: CheckpointPart) -> tuple[CheckpointParts, tuple[CheckpointIndex, CheckpointSaved] | None]:
        """With one more part; index and event of the checkpoint that it completes, with which older ones are given up."""
        parts = (*self.parts.get(part.iterations, ()), part)
        written: dict[int, dict[Part, int]] = {layer: {} for layer in range(self.n_layers)}
        for one in sorted(parts, key=lambda one: Part(*one.part).low):
            for layer in one.layers:
                written[layer][Part(*one.part)] = one.rank
        if not all(map(make_whole, written.values())):
            return msgspec.structs.replace(self, parts={**self.parts, part.iterations: parts}), None
        later = {iterations: those for iterations, those in self.parts.items() if iterations > part.iterations}
        index = CheckpointIndex(
            iterations=part.iterations,
            writers=tuple(next(iter(of.values())) for of in written.values()),
            slices={
                layer: tuple(Slice(rank, held.first, held.end, held.of) for held, rank in of.items())
                for layer, of in written.items()
                if len(of) > 1
            },
        )
        saved = CheckpointSaved(
            iterations=part.iterations,
            bytes=sum(one.bytes for one in parts),
            seconds=max(one.seconds for one in parts),
            paused_us=max(one.paused_us for one in parts),
        )
        return msgspec.structs.replace(self, parts=later), (index, saved)
