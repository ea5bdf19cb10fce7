"""Policies on traces of losses and returns: recorded ones where they are at hand, generated ones; 64 to 1,024 GPUs.

Nobody who keeps checkpoints may do worse than checkpoint-restart on whole replicas: its effective time is the bar of each row.
"""

from __future__ import annotations

from collections.abc import Iterator

from support import datasets

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.lab.simulator.arrivals import arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import parse_cluster, parse_faults
from unskew.analytics.policies.base import Policy
from unskew.analytics.policies.registry import POLICIES
from unskew.analytics.policies.unskew import UnskewPolicy
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.edge.failure_trace import load_trace

JOBS = ("llama2-7b,dp=8", "llama-30b", "llama2-70b,dp=2", "llama2-70b", "llama2-70b,dp=16")
"""64, 64, 128, 256 and 1,024 GPUs."""
LEVELS_UP_TO = 128
"""GPUs up to which ResiHP is played, and Unskew with its levels as candidates: 9/10 of the planning of larger jobs."""
MOST_DEVICE_HOURS = 3_000.0
"""A recorded trace is played for at most so many GPU-hours."""
RECORDED = (
    ("spot instances", ("spot-preemption", "aws-p3-events.csv"), 11.4),
    ("LANL, the system with most outages", ("lanl-failures", "failures.parquet"), 500.0),
)
GENERATED = (
    ("nodes that return", "mtbf_s=1800,scope=node,repair_s=1800"),
    ("nodes that never return", "mtbf_s=3600,scope=node"),
    ("switches that take 32 nodes along", "mtbf_s=5400,scope=node,repair_s=900,correlated_share=0.5"),
)
HOURS = 24.0


def figures(_bench: Bench, jobs: tuple[str, ...] = JOBS) -> Iterator[Figure]:
    """A row for each trace and size."""
    for spec in jobs:
        job = parse_cluster(spec)
        for name, place, hours in RECORDED:
            title = f"{spec}, {job.devices:,} GPUs, {name}: effective time of Unskew"
            if (path := datasets.find(*place)) is None:
                yield figure(title, None, "%", better="higher", note=f"data set {place[0]} is absent")
            else:
                played = min(hours, max(4.0, MOST_DEVICE_HOURS / job.devices)) if hours < HOURS else hours
                yield _row(title, job, load_trace(path, job, hours=played), played)
        for name, law in GENERATED:
            title = f"{spec}, {job.devices:,} GPUs, {name}: effective time of Unskew"
            yield _row(title, job, arrivals(job, parse_faults(law), hours=HOURS, seed=0), HOURS)


def _row(title: str, job: Job, cluster_events: list[ClusterEvent], hours: float) -> Figure:
    small = job.devices <= LEVELS_UP_TO
    others: dict[str, Policy] = {"checkpoint-restart": POLICIES["checkpoint-restart"](), "malleus": POLICIES["malleus"]()}
    if small:
        others["resihp"] = POLICIES["resihp"]()
    options = SimulationOptions(hours=hours)
    ours = simulate(job, UnskewPolicy(levels=small), cluster_events, options)
    share = {name: 100.0 * simulate(job, one, cluster_events, options).effective for name, one in others.items()}
    note = f"bar: {', '.join(f'{name} {value:.1f}' for name, value in share.items())}; capacity {100.0 * ours.capacity:.1f}; "
    note += f"{ours.failures} losses in {hours:g} h"
    return figure(title, 100.0 * ours.effective, "%", bar=share["checkpoint-restart"], better="higher", note=note)
