"""A schedule and the durations of its chunks -> a timeline (dag.py has the pass itself).

Predictor, what-if, scheduler and simulator all use this. Two entries:

* `evaluate(schedule, durations)` for a plan: every chunk of every rank;
* `pipeline_of(name, ...)` for planners and simulators: one pipeline of a schedule as arrays, cached, without a plan. Replicas,
  candidates or iterations of the same form are a further axis of the durations: one pass for all of them.

>>> from unskew.analytics.pipeline.evaluator import pipeline_of
>>> pipeline = pipeline_of("1f1b", ranks=4, micro_batches=8)
>>> float(pipeline.makespan_us(per_hop(pipeline, np.array([[1.0] * 4, [2.0] * 4]))))
33.0
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import msgspec
import numpy as np

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import stage_order_of
from unskew.analytics.pipeline.dag import Array, Chunks, Messages
from unskew.analytics.pipeline.schedule import Schedule, build_schedule


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
        return {rank: self.end_us[positions[-1]] for rank, positions in self.schedule.chunks.rank_positions()}

    @cached_property
    def busy_us(self) -> dict[int, Array]:
        """Time each rank spends in chunks; the rest of the makespan it waits. Ranks without actions are absent."""
        spent = self.end_us - self.start_us
        return {rank: spent[positions].sum(axis=0) for rank, positions in self.schedule.chunks.rank_positions()}


def evaluate(schedule: Schedule, durations_us: Array, messages: float | Array | Messages = 0.0) -> Timeline:
    """The timeline when action i of `schedule.order` takes `durations_us[i]`: [action, ...further axes].

    `messages`: what they cost; a number, or one per action, is how long the message that brings its input is on its way.
    """
    return Timeline(schedule, *schedule.chunks.run(durations_us, messages))


@lru_cache(maxsize=512)
def pipeline_of(schedule: str, *, ranks: int, micro_batches: int) -> Chunks:
    """One pipeline as arrays: ranks 0..ranks-1, passed as the schedule does. Raises `PlanError` for an unknown schedule."""
    stage_order = stage_order_of(schedule, range(ranks))
    plan = plan_from_partition(
        plan_version=0,
        n_layers=len(stage_order),
        schedule=schedule,
        members=[stage_order],
        layers=[[1] * len(stage_order)],
        micro_batches=[micro_batches],
    )
    return build_schedule(plan).chunks


def per_hop(pipeline: Chunks, costs_us: Array) -> Array:
    """Durations of a pipeline's chunks from costs per kind and hop: [kind, hop, ...axes] -> [chunk, ...axes].

    Kinds are those of the schedule: F, B (whole) or F, B, W. A hop is one range of layers, in stage order.
    """
    return np.asarray(costs_us[pipeline.kind, pipeline.hop])
