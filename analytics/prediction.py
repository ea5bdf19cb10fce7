"""Plan + batches + cost model + speeds -> predicted iteration time.

A chunk takes ``(n_layers x layer + head) / speed`` (analytics/cost.py); the pipeline model lays the chunks out; an iteration
lasts until the last rank is done, plus the constant end of an iteration (gradients, vote, optimiser). For models whose layers
differ (embedding, head, MoE, Mamba), `unit_durations_us` takes the costs from a model profile instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.cost import HEALTHY, CostModel, Speeds, speed_of
from unskew.analytics.model_profiles import TOKENS, ModelProfile
from unskew.analytics.pipeline import Array, Timeline, evaluate
from unskew.analytics.plan import Plan
from unskew.analytics.schedule import Schedule, build_schedule, splits_backward
from unskew.analytics.workload import Work


class Prediction(msgspec.Struct, frozen=True):
    """`iteration_us` = makespan of `timeline` + the iteration's end."""

    iteration_us: float
    timeline: Timeline


class LayerCosts(msgspec.Struct, frozen=True):
    """Microseconds of one layer and of the head on a healthy device, per kind of work: arrays [micro-batch, iteration]."""

    layer_us: dict[str, Array]
    head_us: dict[str, Array]


def predict_iteration(plan: Plan, works: Sequence[Work], cost: CostModel, speeds: Speeds = HEALTHY) -> Prediction:
    """The predicted iteration in which micro-batch m carries `works[m]`; ranks and kinds not in `speeds` are healthy."""
    schedule = build_schedule(plan)
    durations = durations_us(schedule, layer_costs([works], model_for(cost, plan.schedule)), speeds)[:, 0]
    timeline = evaluate(schedule, durations, cost.message_us)
    return Prediction(float(timeline.makespan_us) + cost.end_us(plan), timeline)


def predict_iterations(plan: Plan, batches: Sequence[Sequence[Work]], cost: CostModel, speeds: Speeds = HEALTHY) -> Array:
    """The predicted times (us) of many iterations at once: [iteration]. `batches[k][m]` is micro-batch m of iteration k."""
    schedule = build_schedule(plan)
    timeline = evaluate(
        schedule, durations_us(schedule, layer_costs(batches, model_for(cost, plan.schedule)), speeds), cost.message_us
    )
    return timeline.makespan_us + cost.end_us(plan)


def model_for(cost: CostModel, schedule: str) -> CostModel:
    """The cost model with B as a schedule of this name executes it: whole, or split into B and W."""
    return cost.split if splits_backward(schedule) else cost.joined


def layer_costs(batches: Sequence[Sequence[Work]], cost: CostModel) -> LayerCosts:
    """What the batches cost whatever the plan: computed once, used for every candidate plan of a schedule (`model_for`)."""

    def matrix(kind: str, n_layers: int, has_head: bool) -> Array:
        rows = [[cost.chunk_us(kind, work, n_layers, has_head=has_head) for work in works] for works in batches]
        return np.array(rows, dtype=np.float64).T

    kinds = tuple(cost.chunks)
    return LayerCosts({kind: matrix(kind, 1, False) for kind in kinds}, {kind: matrix(kind, 0, True) for kind in kinds})


def durations_us(schedule: Schedule, costs: LayerCosts, speeds: Speeds) -> Array:
    """Durations of the actions of `schedule.order`: [action, iteration]. The costs must know the kinds that the schedule has
    (`model_for`)."""
    order, n_layers = schedule.order, schedule.plan.n_layers
    layers = np.array([action.n_layers for action in order], dtype=np.float64)[:, None]
    head = np.array([action.first_layer + action.n_layers == n_layers for action in order], dtype=np.float64)[:, None]
    speed = np.array([speed_of(speeds, action.rank, action.kind) for action in order])[:, None]
    kinds = list(costs.layer_us)
    rows = np.array([(kinds.index(action.kind), action.micro_batch) for action in order]).T
    layer_us = np.stack([costs.layer_us[kind] for kind in kinds])[rows[0], rows[1]]
    head_us = np.stack([costs.head_us[kind] for kind in kinds])[rows[0], rows[1]]
    return np.asarray((layers * layer_us + head * head_us) / speed)


def unit_durations_us(
    schedule: Schedule, profile: ModelProfile, batches: Sequence[Sequence[Work]], speeds: Speeds = HEALTHY
) -> Array:
    """Durations when the plan's layers are the units of a model profile, unequal as they are: [action, iteration].

    A chunk takes the sum over its units of ``linear x tokens / TOKENS + quadratic x sum of squares / TOKENS^2`` (W has no
    quadratic part); B is whole where the schedule does not split it. Raises `ValueError` when the counts do not fit.
    """
    order = schedule.order
    if schedule.plan.n_layers != len(profile.units):
        raise ValueError(f"a plan of {schedule.plan.n_layers} layers for {profile.name}, which has {len(profile.units)} units")
    quadratic = np.array([(unit.f_quadratic_us, unit.b_quadratic_us, 0.0) for unit in profile.units]).T
    linear = profile.costs_us() - quadratic
    if not splits_backward(schedule.plan.schedule):
        linear[1] += linear[2]
    sums = [np.concatenate([np.zeros((3, 1)), np.cumsum(part, axis=1)], axis=1) for part in (linear, quadratic)]
    kind, micro_batch = schedule.chunks.kind, schedule.chunks.micro_batch
    first = np.array([action.first_layer for action in order])
    end = first + np.array([action.n_layers for action in order])
    per_linear, per_quadratic = ((part[kind, end] - part[kind, first])[:, None] for part in sums)
    tokens = np.array([[work.tokens for work in works] for works in batches], dtype=np.float64).T / TOKENS
    squares = np.array([[work.sum_sq for work in works] for works in batches], dtype=np.float64).T / TOKENS**2
    speed = np.array([speed_of(speeds, action.rank, action.kind) for action in order])[:, None]
    return np.asarray((per_linear * tokens[micro_batch] + per_quadratic * squares[micro_batch]) / speed)
