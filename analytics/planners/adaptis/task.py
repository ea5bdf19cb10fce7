"""AdaPtis' question and answer: a pipeline to tune, and what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import numpy as np

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.actions import action_of
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.memory import peak_activations
from unskew.analytics.pipeline.notation import with_orders
from unskew.analytics.pipeline.schedule import build_schedule, evaluate, per_hop
from unskew.analytics.planners.adaptis.dispatch import Step
from unskew.analytics.planners.adaptis.layouts import PipelineLayout


class AdaptisTask(msgspec.Struct, frozen=True, kw_only=True):
    """`costs_us` [kind F B W, unit] on a healthy device, `speeds` per device, `kept` activations per unit (bytes, or any unit),
    of the last one with its logits; `held` by each unit all the time: parameters, moments, gradients, buffers (() = none that
    counts); `limit`: the most that a device may have of both, the paper's M_d (None = as the baselines)."""

    costs_us: Array
    speeds: tuple[float, ...]
    micro_batches: int
    kept: Array
    message_us: float = 0.0
    held: Sequence[float] = ()
    limit: float | None = None

    @property
    def n_units(self) -> int:
        return int(self.costs_us.shape[1])


class AdaptisResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `baselines_us`: schedule -> makespan (those that fit the task). `bound_us`: no plan of the task is faster."""

    layout: PipelineLayout
    lists: tuple[tuple[Step, ...], ...]
    makespan_us: float
    kept_peak: float
    baselines_us: dict[str, float]
    bound_us: float
    evaluations: int

    def plan(self, *, replicas: int = 1) -> Plan:
        """The answer for equal replicas: device i of replica d is rank ``d * devices + i``, units are the plan's layers."""
        devices = len(self.lists)
        return plan_of([(range(d * devices, (d + 1) * devices), self) for d in range(replicas)])

    @property
    def micro_batches(self) -> int:
        """How many pass the pipeline."""
        return sum(kind == "F" and stage == 0 for steps in self.lists for kind, stage, _ in steps)


def plan_of(replicas: Sequence[tuple[Sequence[int], AdaptisResult]], *, plan_version: int = 0) -> Plan:
    """The plan of replicas that were searched for each on its own: (the ranks that are its devices, the answer)."""
    plan = plan_from_partition(
        plan_version=plan_version,
        n_layers=sum(replicas[0][1].layout.sizes),
        schedule="searched",
        members=[[ranks[device] for device in found.layout.device] for ranks, found in replicas],
        layers=[found.layout.sizes for _, found in replicas],
        micro_batches=[found.micro_batches for _, found in replicas],
    )
    routes = [[route for route in plan.routes if route.replica == d] for d in range(len(replicas))]
    return with_orders(
        plan,
        {
            ranks[device]: [action_of(routes[d][m], kind, stage) for kind, stage, m in steps]
            for d, (ranks, found) in enumerate(replicas)
            for device, steps in enumerate(found.lists)
            if steps
        },
    )


def answer_of(task: AdaptisTask, layout: PipelineLayout, lists: tuple[tuple[Step, ...], ...]) -> AdaptisResult:
    """The orders as an answer, timed by the evaluator."""
    blank = untimed(layout, lists)
    schedule = build_schedule(blank.plan())
    durations = per_hop(schedule.chunks, stage_costs(task, layout))
    return msgspec.structs.replace(
        blank,
        makespan_us=float(evaluate(schedule, durations, task.message_us).makespan_us),
        kept_peak=most_kept(task, layout, peak_activations(schedule.chunks, stage_kept(task, layout))),
    )


def untimed(layout: PipelineLayout, lists: tuple[tuple[Step, ...], ...]) -> AdaptisResult:
    """The orders as an answer of which no time is known yet."""
    return AdaptisResult(
        layout=layout, lists=lists, makespan_us=inf, kept_peak=inf, baselines_us={}, bound_us=0.0, evaluations=0
    )


def most_kept(task: AdaptisTask, layout: PipelineLayout, activations: Mapping[int, float]) -> float:
    """Of all devices, each with the activations that it keeps at most and what its stages hold."""
    device_held = defaultdict[int, float](float)
    for device, held in zip(layout.device, stage_held(task, layout), strict=True):
        device_held[device] += held
    return max(kept + device_held[device] for device, kept in activations.items())


def stage_held(task: AdaptisTask, layout: PipelineLayout) -> list[float]:
    """[stage]"""
    return [float(sum(task.held[first:end])) for first, end in layout.spans]


def stage_kept(task: AdaptisTask, layout: PipelineLayout) -> Array:
    """Activations of one micro-batch: [stage]."""
    return np.array([task.kept[first:end].sum() for first, end in layout.spans])


def stage_costs(task: AdaptisTask, layout: PipelineLayout) -> Array:
    """Microseconds at the devices' speeds: [kind, stage]."""
    sums = np.add.reduceat(task.costs_us, [first for first, _ in layout.spans], axis=1)
    return np.asarray(sums / np.array([task.speeds[device] for device in layout.device]))


def gains(found: AdaptisResult) -> dict[str, float]:
    """How many times faster the answer is than each baseline, and "bound": its time over the lower bound."""
    over = {name: us / found.makespan_us for name, us in found.baselines_us.items()}
    return {**over, "bound": found.makespan_us / found.bound_us}
