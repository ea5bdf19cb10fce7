"""Chunk times as they would be if ...: each takes durations [operation, iteration] (us) and gives changed ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array


def balanced_lengths(section: TraceSection, work_us: Array) -> Array:
    """Every micro-batch carries the mean workload: what lengths explain is taken out, ``t x mean(expected) / expected``."""
    changed = work_us.copy()
    for members in section.cells.values():
        expected = section.expected_us[members]
        changed[members] *= expected.mean() / expected
    return changed


def equal_stages(section: TraceSection, work_us: Array) -> Array:
    """Every stage takes the mean of all chunks, per kind of work: ``t x mean(t) / mean(t of its stage)``; the work of all
    stages together stays what it was."""
    changed = work_us.copy()
    for kind in section.kinds:
        mine = {stage: members for (of, stage), members in section.cells.items() if of == kind}
        mean = work_us[np.concatenate(list(mine.values()))].mean()
        for members in mine.values():
            changed[members] *= mean / work_us[members].mean()
    return changed


def healthy_device(section: TraceSection, work_us: Array, rank: int) -> Array:
    """`rank` is as fast as its peers: its chunks take what their workload lets expect, times what the other ranks of its stage
    (where there are none: of all stages) took over that."""
    changed = work_us.copy()
    operations = section.recording.graph.operations
    everywhere = {
        kind: [i for (of, _), members in section.cells.items() if of == kind for i in members if operations[i].rank != rank]
        for kind in section.kinds
    }
    for (kind, _), members in section.cells.items():
        mine = [i for i in members if operations[i].rank == rank]
        if not mine:
            continue
        others = [i for i in members if operations[i].rank != rank] or everywhere[kind]
        pace = np.median(work_us[others] / section.expected_us[others]) if others else 1.0
        changed[mine] = pace * section.expected_us[mine]
    return changed


def even_links(section: TraceSection, work_us: Array, links: Iterable[tuple[int, int]]) -> Array:
    """Messages between these pairs of ranks take the median of all messages of their kind."""
    changed = work_us.copy()
    slow = {frozenset(link) for link in links}
    operations = section.recording.graph.operations
    for kind in {operation.kind for operation in operations if operation.peer is not None}:
        all_of_kind = [i for i, operation in enumerate(operations) if operation.kind == kind]
        mine = [i for i in all_of_kind if frozenset((operations[i].rank, operations[i].peer)) in slow]
        others = sorted(set(all_of_kind) - set(mine))
        if mine and others:
            changed[mine] = np.minimum(work_us[mine], np.median(work_us[others]))
    return changed
