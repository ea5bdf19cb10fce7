"""The one evaluator of pipelines: a schedule and the durations of its chunks -> a timeline.

ResiHP's iteration predictor (section 4.3, eq. 2): vertices are chunks; edges are the data (forwards along the route, backwards
against it, a message's time where ranks differ) and each rank's order; a chunk starts when everything before it has ended, one
pass in topological order. Predictor, what-if, scheduler and simulator all use this.

Durations may carry further axes (iterations, draws): they go through in the same pass.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.schedule import Schedule

Array = NDArray[np.float64]


class Timeline(msgspec.Struct, frozen=True, dict=True):
    """When each action of `schedule.order` runs, in us from the iteration's start: arrays [action, ...further axes]."""

    schedule: Schedule
    start_us: Array
    end_us: Array

    @cached_property
    def makespan_us(self) -> Array:
        """End of the last action: [...further axes]."""
        return np.asarray(self.end_us.max(axis=0))

    @cached_property
    def finish_us(self) -> dict[int, Array]:
        """End of each rank's last action; ranks without actions are absent."""
        return {action.rank: end for action, end in zip(self.schedule.order, self.end_us, strict=True)}

    @cached_property
    def busy_us(self) -> dict[int, Array]:
        """Time each rank spends in chunks; the rest of the makespan it waits. Ranks without actions are absent."""
        busy: dict[int, Array] = {}
        for action, spent in zip(self.schedule.order, self.end_us - self.start_us, strict=True):
            busy[action.rank] = busy.get(action.rank, 0.0) + spent
        return busy


def evaluate(schedule: Schedule, durations_us: Array, message_us: float = 0.0) -> Timeline:
    """The timeline when action i of `schedule.order` takes `durations_us[i]`: [action, ...further axes]."""
    start, end = np.zeros_like(durations_us), np.empty_like(durations_us)
    for position, (before, given, crosses) in enumerate(schedule.needs):
        if given >= 0:
            start[position] = end[given] + message_us if crosses else end[given]
        if before >= 0:
            start[position] = np.maximum(start[position], end[before])
        end[position] = start[position] + durations_us[position]
    return Timeline(schedule, start, end)
