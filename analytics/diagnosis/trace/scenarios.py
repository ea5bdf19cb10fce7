"""Chunk times as they would be if ...: each takes durations [operation, iteration] (us) and gives changed ones.

No scenario leaves the range of the data: no iteration gets cheaper than its own cheapest chunks of the same kind make it (where
a device or a replica was slow in all of it, than the cheapest of any iteration do), and what a single chunk took beyond its
workload is not multiplied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from unskew.analytics.diagnosis.trace.section import KIND, TraceSection
from unskew.analytics.pipeline.dag import Array

STALL = 2.0
"""A chunk that takes more than this times what its workload lets expect was held up: no estimate is that wrong."""


def balanced_lengths(section: TraceSection, work_us: Array) -> Array:
    """An iteration's micro-batches carry equal work: of what lengths explain each chunk takes the mean of its stage in it;
    what is left stays, and shrinks with a chunk that was long."""
    changed = work_us.copy()
    for members in section.places.values():
        work, expected = work_us[members], section.expected_us[members]
        ratio = expected.mean(axis=0) / expected
        explained = np.minimum(work, expected)
        changed[members] = np.maximum(explained * ratio + (work - explained) * np.minimum(ratio, 1.0), work.min(axis=0))
    return changed


def equal_stages(section: TraceSection, work_us: Array) -> Array:
    """Every stage takes the mean of all chunks, per kind of work: ``t x mean(t) / mean(t of its stage)``; the work of all
    stages together stays what it was."""
    changed = work_us.copy()
    for kind in section.kinds:
        mine = {stage: members for (of, stage), members in section.cells.items() if of == kind}
        work = work_us[np.concatenate(list(mine.values()))]
        for members in mine.values():
            evened = work_us[members] * (work.mean() / work_us[members].mean())
            changed[members] = np.clip(evened, work.min(axis=0), work.max(axis=0))
    return changed


def without_pattern(section: TraceSection, work_us: Array) -> Array:
    """Chunks of a kind that take longer than others in every iteration (by their median over the iterations) take the same."""
    changed = work_us.copy()
    for kind in section.kinds:
        mine = np.concatenate([members for (of, _), members in section.cells.items() if of == kind])
        work = work_us[mine]
        usual = np.maximum(np.median(work, axis=1, keepdims=True), 1e-9)
        changed[mine] = np.clip(work * usual.mean() / usual, work.min(axis=0), work.max(axis=0))
    return changed


def healthy_device(section: TraceSection, work_us: Array, rank: int, slow: Collection[int] = ()) -> Array:
    """`rank` is as fast as its peers: its chunks take what their workload lets expect, times what the other ranks of its stage
    (where there are none: of all stages) took over that. Those that are `slow` themselves are no measure of it."""
    changed = work_us.copy()
    operations, unfit = section.recording.graph.operations, {rank, *slow}
    everywhere = {
        kind: [
            i for (of, _), members in section.cells.items() if of == kind for i in members if operations[i].rank not in unfit
        ]
        for kind in section.kinds
    }
    cheapest = _cheapest_us(section, work_us)
    for (kind, _), members in section.cells.items():
        mine = [i for i in members if operations[i].rank == rank]
        if not mine:
            continue
        others = [i for i in members if operations[i].rank not in unfit] or everywhere[kind]
        pace = np.median(work_us[others] / section.expected_us[others]) if others else 1.0
        changed[mine] = np.maximum(pace * section.expected_us[mine], cheapest[kind])
    return changed


def even_replica(section: TraceSection, work_us: Array, replica: int, speed: Mapping[str, float]) -> Array:
    """The replica's chunks take what they would at the others' pace; `speed`: the pace of each kind of work, theirs is 1."""
    changed, cheapest = work_us.copy(), _cheapest_us(section, work_us)
    for i, operation in enumerate(section.recording.graph.operations):
        if operation.replica == replica and operation.micro_batch is not None:
            kind = KIND[operation.kind]
            changed[i] = np.maximum(work_us[i] * speed.get(kind, 1.0), cheapest[kind])
    return changed


def _cheapest_us(section: TraceSection, work_us: Array) -> dict[str, float]:
    """Kind of work -> the least that a chunk of it took, anywhere and in any iteration."""
    least: dict[str, float] = {}
    for (kind, _), members in section.cells.items():
        least[kind] = min(least.get(kind, np.inf), float(work_us[members].min()))
    return least


def without_waits(section: TraceSection, work_us: Array) -> Array:
    """No chunk waits for other ranks in its middle."""
    return np.asarray(work_us - section.recording.within_us)


def without_stalls(section: TraceSection, work_us: Array) -> Array:
    """Chunks that were held up take what their workload lets expect."""
    held_up = work_us > STALL * section.expected_us  # never of other operations, of which nothing is expected
    return np.where(held_up, section.expected_us, work_us)


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


def usual_communication(section: TraceSection, work_us: Array) -> Array:
    """No communication takes longer than the median of its like on its stage."""
    changed = work_us.copy()
    cells: dict[tuple[object, ...], list[int]] = {}
    for i, operation in enumerate(section.recording.graph.operations):
        if operation.kind in section.recording.waits:
            cells.setdefault((operation.alike, operation.stage), []).append(i)
    for members in cells.values():
        changed[members] = np.minimum(work_us[members], np.median(work_us[members]))
    return changed
