"""scale: policies from 256 to 98,304 GPUs, and how long a plan takes there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS, Job
from unskew.analytics.cluster.random_faults import RATES
from unskew.analytics.core.constants import constant
from unskew.analytics.lab.simulator.arrivals import FaultLaw, arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.studies.frame import Cell, Figures, Study, StudyRow
from unskew.analytics.policies.base import ClusterView, Policy, Reaction
from unskew.analytics.policies.registry import POLICIES
from unskew.analytics.policies.restart import best_interval_s

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SIZES = (256, 1024, 4096, 16384, 98304)
_POLICIES = ("checkpoint-restart", "oobleck", "ft-hsdp", "resihp", "joint", "unskew")
_TIMED = ("joint", "unskew")
_HOURS = 12.0
_PLAN = "CPU seconds of a plan"


def job_of(size: int) -> Job:
    """LLaMA2-70B on `size` GPUs: more replicas of the same 64 GPUs, each with the same micro-batches."""
    base = JOBS["llama2-70b"]
    dp = base.dp * size // base.devices
    return msgspec.structs.replace(base, name=f"{size} GPUs", dp=dp, micro_batches=base.micro_batches // base.dp * dp)


def _scale(cell: Cell) -> Figures:
    """Twelve hours at RSC-1's failure rate with repair, no noise. checkpoint-restart has spare nodes and the interval that
    costs least for this rate; for the others, who rarely go back to a checkpoint, it is the constants' half hour."""
    size = int(cell.params["size"])
    job = job_of(size)
    law = FaultLaw(failures_per_node_day=RATES["rsc1"].failures_per_node_day, repair_s=constant("repair_median_s"))
    cluster_events = arrivals(job, law, hours=_HOURS, seed=cell.seed)
    interval_s = best_interval_s(constant("checkpoint_stall_s"), 86400.0 / (law.failures_per_node_day * job.nodes))
    found: Figures = {}
    for name in _POLICIES:
        policy, spares = POLICIES[name](), 0
        if policy.most_devices is not None and size > policy.most_devices:
            continue
        if name == "checkpoint-restart":
            policy.checkpoint_s, spares = interval_s, 10**6
        plans = _Stopwatch(policy)
        outcome = simulate(
            job, policy, cluster_events, SimulationOptions(hours=_HOURS, seed=cell.seed, spares=spares, noise_cv=0.0)
        )
        found[f"{size:,} GPUs: {name}"] = 100.0 * outcome.effective
        if name in _TIMED and plans.seconds:
            found[f"{size:,} GPUs: {_PLAN}, {name}, slowest"] = max(plans.seconds)
    return found


class _Stopwatch:
    """The CPU seconds of every answer of a policy."""

    def __init__(self, policy: Policy) -> None:
        self.seconds: list[float] = []
        self._react = policy.react
        policy.react = self._timed  # type: ignore[method-assign]  # the policy's other attributes are read by the simulator

    def _timed(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        begun = time.process_time()
        answer = self._react(cluster, event)
        self.seconds.append(time.process_time() - begun)
        return answer


def _growth(rows: Sequence[StudyRow]) -> Figure:
    """Effective time of each policy and the seconds of a plan, over the number of GPUs."""
    from plotly.subplots import make_subplots  # noqa: PLC0415  # half a second that only a finished study pays

    lines: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        size, what = row.figure.split(" GPUs: ")
        if row.ours is not None:
            reach = row.high - row.ours if row.high is not None else 0.0
            lines.setdefault(what, []).append((int(size.replace(",", "")), row.ours, reach))
    figure = make_subplots(rows=1, cols=2, subplot_titles=("effective time, %", "CPU seconds of our slowest plan"))
    for what, points in lines.items():
        gpus, values, reaches = (list(part) for part in zip(*sorted(points), strict=True))
        column = 2 if what.startswith(_PLAN) else 1
        figure.add_scatter(x=gpus, y=values, name=what, error_y={"type": "data", "array": reaches}, row=1, col=column)
    figure.update_xaxes(type="log", title="GPUs")
    figure.update_yaxes(type="log", row=1, col=2)
    return figure


SCALE = Study(
    name="scale",
    about="effective training time from 256 to 98,304 GPUs, RSC-1's failure rate, 12 hours",
    unit="% of the time",
    cells=lambda seeds: [
        Cell(study="scale", name=f"{size} GPUs", seed=seed, params={"size": size}) for size in SIZES for seed in range(seeds)
    ],
    measure=_scale,
    draw=_growth,
    notes=(
        "checkpoint-restart has spare nodes without end and its best interval, the others no spares and half an hour",
        "unskew, which plans rank by rank, up to 1,024 GPUs",
        "a larger job has more replicas of the same 64 GPUs; ft-hsdp's replica is these 64, not the paper's 8,192",
    ),
)
