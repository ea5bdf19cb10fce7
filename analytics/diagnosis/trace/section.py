"""A stretch of a run under one plan, ready to be asked what if: a recording, and what its chunks should have taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.diagnosis.trace.inference import infer
from unskew.analytics.diagnosis.trace.replay import OperationDurations, TraceRecording, take_apart
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import CHUNK_KINDS

KIND: dict[str, str] = {"forward-compute": "F", "backward-compute": "B", **{kind: kind for kind in CHUNK_KINDS}}
"""Kinds of operations that are chunks of work -> the kind of work."""
Indices = NDArray[np.intp]


class TraceSection(msgspec.Struct, frozen=True, dict=True):
    """`expected_us` [operation, iteration]: what a healthy device of the stage takes for the chunk's workload; NaN for other
    operations. `lengths_logged` False: inferred from peers. `correlation`: of forward with backward times over micro-batches.
    `plan_version`: of the plan (0 in an imported run)."""

    recording: TraceRecording
    expected_us: Array
    lengths_logged: bool
    correlation: float | None = None
    plan_version: int = 0

    @cached_property
    def parts(self) -> OperationDurations:
        return take_apart(self.recording)

    @cached_property
    def cells(self) -> dict[tuple[str, int], Indices]:
        """(kind of work, stage) -> the operations that are its chunks."""
        found: dict[tuple[str, int], list[int]] = {}
        for i, operation in enumerate(self.recording.graph.operations):
            if operation.micro_batch is not None:
                found.setdefault((KIND[operation.kind], operation.stage), []).append(i)
        return {cell: np.array(members) for cell, members in sorted(found.items())}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({kind for kind, _ in self.cells}))

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({stage for _, stage in self.cells}))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({operation.rank for operation in self.recording.graph.operations}))


def with_lengths(
    recording: TraceRecording, works: Mapping[int, Sequence[Work]], cost: CostModel, plan_version: int
) -> TraceSection:
    """A section whose chunks should take what `cost` predicts for their lengths: `works[iteration][micro-batch]`."""
    operations = recording.graph.operations
    n_layers = max((sum(operation.layers) for operation in operations if operation.layers is not None), default=0)
    expected = np.full_like(recording.wall_us, np.nan)
    for i, operation in enumerate(operations):
        if operation.layers is None or operation.micro_batch is None:
            continue
        first, count = operation.layers
        has_head, place = first + count == n_layers, cost.place_of(operation.rank)
        for column, iteration in enumerate(recording.iterations):
            work = works[iteration][operation.micro_batch] if iteration in works else work_of(())
            us = cost.chunk_us(operation.kind, work, count, has_head=has_head, place=place)
            expected[i, column] = max(us, 1e-3)
    return TraceSection(recording, expected, lengths_logged=True, plan_version=plan_version)


def without_lengths(recording: TraceRecording) -> TraceSection:
    """A section whose workload is inferred from peers (inference.py). Raises `ValueError` when that cannot be done."""
    bare = TraceSection(recording, np.full_like(recording.wall_us, np.nan), lengths_logged=False)
    operations = recording.graph.operations
    batches = sorted({(o.replica, o.micro_batch) for o in operations if o.micro_batch is not None})
    column = {batch: i for i, batch in enumerate(batches)}
    index = np.full((len(bare.kinds), len(bare.stages), len(batches)), -1)
    for (kind, stage), members in bare.cells.items():
        for i in members:
            at = column[operations[i].replica, operations[i].micro_batch]
            index[bare.kinds.index(kind), bare.stages.index(stage), at] = i
    if (index < 0).any():
        raise ValueError("not every micro-batch ran on every stage, so its workload cannot be inferred from peers")
    times = bare.parts.work_us[index].reshape(*index.shape[:2], -1)
    found = infer(times, bare.kinds, "stage" if len(bare.stages) > 1 else "kind")
    expected = bare.expected_us.copy()
    expected[index] = found.expected_us.reshape(*index.shape, -1)
    return msgspec.structs.replace(bare, expected_us=expected, correlation=found.correlation)
