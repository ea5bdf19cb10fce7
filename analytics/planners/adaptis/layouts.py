"""Which units make a stage and which device has it: layouts of one pipeline, and the moves between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import msgspec
import numpy as np

from unskew.analytics.core.plan import split_evenly
from unskew.analytics.pipeline.dag import Array

PASS_SHARES = ((1,), (1, 1), (1, 2), (2, 1), (1, 1, 1), (1, 2, 2), (1, 3, 2), (1, 1, 1, 1), (1, 2, 2, 1))
"""How the work of a device is shared among its ranges at the start of a search: short first ranges fill the pipeline sooner."""


class PipelineLayout(msgspec.Struct, frozen=True, dict=True):
    """`sizes[k]` units in stage k, executed by `device[k]`; a micro-batch passes the stages in order."""

    sizes: tuple[int, ...]
    device: tuple[int, ...]

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first unit, end) of each stage."""
        ends = list(accumulate(self.sizes))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


def usual(n_units: int, stages: int) -> tuple[int, ...]:
    """Megatron's partition: blocks in equal shares, the embedding (first unit) and head (last) on top of the outer stages.

    >>> usual(10, 4)
    (3, 2, 2, 3)
    """
    if n_units < stages + 2:
        return tuple(split_evenly(n_units, stages))
    sizes = split_evenly(n_units - 2, stages)
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def start_layouts(units_us: Array, speeds: Sequence[float]) -> Iterator[PipelineLayout]:
    """1 to 4 ranges per device, in a loop and there and back, over all devices, and over all but the last, which then has one
    range at the end: a large output head leaves no room for more. Loads are balanced; `units_us` [unit]."""
    every = list(range(len(speeds)))
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for shares in PASS_SHARES:
        for there, end in ((every, []), (every[:-1], every[-1:])):
            back = [there if turn % 2 == 0 else there[::-1] for turn in range(len(shares))]
            weights = [float(share) for share in shares for _ in there] + [float(sum(shares))] * len(end)
            for stage_order in ((*there * len(shares), *end), (*(device for turn in back for device in turn), *end)):
                if 0 < len(stage_order) <= len(units_us) and (stage_order, shares) not in seen:
                    seen.add((stage_order, shares))
                    yield balanced(stage_order, units_us, speeds, weights)


def balanced(stage_order: Sequence[int], units_us: Array, speeds: Sequence[float], weights: Sequence[float]) -> PipelineLayout:
    """Stages on the devices of `stage_order`, with units moved over their boundaries until no single move lowers the
    largest load of a device (then the sum of squared loads). Starts from stages in proportion to their weight and their
    device's speed."""
    share = np.array([speeds[device] * weight for device, weight in zip(stage_order, weights, strict=True)])
    wanted = np.cumsum(share / share.sum()) * units_us.sum()
    ends = [int(end) for end in np.searchsorted(np.cumsum(units_us) - units_us / 2, wanted[:-1])]
    total, stages = len(units_us), len(stage_order)
    for stage in range(stages - 1):
        ends[stage] = min(max(ends[stage], (ends[stage - 1] if stage else 0) + 1), total - (stages - 1 - stage))
    work = np.concatenate([[0.0], np.cumsum(units_us)])

    def score(ends: list[int]) -> tuple[float, float]:
        bounds = [0, *ends, total]
        loads = np.zeros(len(speeds))
        np.add.at(loads, list(stage_order), np.diff(work[bounds]))
        loads /= np.asarray(speeds)
        return round(float(loads.max()), 6), float((loads**2).sum())

    best = score(ends)
    improved = True
    while improved:
        improved = False
        for stage in range(stages - 1):
            for step in (-1, 1):
                trial = [*ends[:stage], ends[stage] + step, *ends[stage + 1 :]]
                bounds = [0, *trial, total]
                if bounds[stage] < bounds[stage + 1] < bounds[stage + 2] and (tried := score(trial)) < best:
                    ends, best, improved = trial, tried, True
    return PipelineLayout(tuple(np.diff([0, *ends, total]).tolist()), tuple(stage_order))


def shifted_boundaries(layout: PipelineLayout) -> Iterator[PipelineLayout]:
    """A unit from one stage to another, all stages between them handing one on."""
    for giver, size in enumerate(layout.sizes):
        if size > 1:
            for taker in range(len(layout.sizes)):
                if taker != giver and (abs(taker - giver) == 1 or layout.device[taker] != layout.device[giver]):
                    sizes = [n - (k == giver) + (k == taker) for k, n in enumerate(layout.sizes)]
                    yield PipelineLayout(tuple(sizes), layout.device)


def moved_stages(layout: PipelineLayout, busiest: int, idlest: int) -> Iterator[PipelineLayout]:
    """Stages to other devices: neighbours exchanged, the busiest device's stages given to the idlest, exchanged with its
    stages, or split with it; neighbours of one device joined."""
    device = list(layout.device)
    for stage in range(len(device) - 1):
        if device[stage] != device[stage + 1]:
            yield _placed(layout, {stage: device[stage + 1], stage + 1: device[stage]})
        else:
            sizes = (*layout.sizes[:stage], sum(layout.sizes[stage : stage + 2]), *layout.sizes[stage + 2 :])
            yield PipelineLayout(sizes, (*device[:stage], *device[stage + 1 :]))
    for stage in (k for k, owner in enumerate(device) if owner == busiest):
        if device.count(busiest) > 1:
            yield _placed(layout, {stage: idlest})
        for other in (k for k, owner in enumerate(device) if owner == idlest):
            yield _placed(layout, {stage: idlest, other: busiest})
        if (size := layout.sizes[stage]) > 1:
            for cut in {1, size // 2, size - 1}:
                sizes = (*layout.sizes[:stage], cut, size - cut, *layout.sizes[stage + 1 :])
                for pair in ((busiest, idlest), (idlest, busiest)):
                    yield PipelineLayout(sizes, (*device[:stage], *pair, *device[stage + 1 :]))


def _placed(layout: PipelineLayout, changes: dict[int, int]) -> PipelineLayout:
    return PipelineLayout(layout.sizes, tuple(changes.get(stage, owner) for stage, owner in enumerate(layout.device)))
