"""Policies on traces of losses and returns: recorded ones where they are at hand, generated ones; 64 to 1,024 GPUs.

Nobody who keeps checkpoints may do worse than checkpoint-restart on whole replicas: its effective time is the bar of each row.
Each policy on each trace is a cell of a study: with ``--store DIR`` a bench that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from support import datasets

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.lab.simulator.arrivals import arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import parse_cluster, parse_faults
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.policies.base import Policy
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.registry import policy
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.edge.failure_trace import load_trace
from unskew.edge.run_study import run_study

JOBS = ("llama2-7b,dp=8", "llama-30b", "llama2-70b,dp=2", "llama2-70b", "llama2-70b,dp=16")
"""64, 64, 128, 256 and 1,024 GPUs."""
LEVELS_UP_TO = 128
"""GPUs up to which ResiHP, and joint with its levels, are played: their planning takes long in larger jobs."""
OURS = {"unskew": "Unskew", "joint": "joint"}
"""Those that have a row of their own; the others stand beside it."""
MOST_DEVICE_HOURS, DENSE_UP_TO = 3_000.0, 48.0
"""A recorded trace of so many hours or fewer, in which nodes go and come by the minute, is played for at most so many
GPU-hours."""
RECORDED = (
    ("spot instances of AWS", ("spot-preemption", "aws-p3-events.csv"), 11.4),
    ("spot instances of GCP", ("spot-preemption", "gcp-a100x1-east1b-counts.csv"), 27.0),
    ("LANL, the system with most outages", ("lanl-failures", "failures.parquet"), 500.0),
)
GENERATED = (
    ("nodes that return", "mtbf_s=1800,scope=node,repair_s=1800"),
    ("nodes that never return", "mtbf_s=3600,scope=node"),
    ("switches that take 32 nodes along", "mtbf_s=5400,scope=node,repair_s=900,correlated_share=0.5"),
)
HOURS = 24.0
STUDY = "scheduler-traces"


def figures(bench: Bench, jobs: Sequence[str] = JOBS) -> Iterator[Figure]:
    """A row for each trace, size, and policy of ours."""
    present = [name for name, place, _ in RECORDED if datasets.find(*place)]
    rows = list(product(jobs, [*present, *(name for name, _ in GENERATED)]))
    cells = [cell for spec, trace in rows for cell in _cells(spec, trace)]
    study = Study(name=STUDY, about="policies on traces", cells=lambda _seeds: cells, measure=_measured)
    counted = bench.counted(f"{STUDY}, policies on traces")
    found = {row.figure: row.ours for row in run_study(study, seeds=1, out=bench.store.root / "studies", on_cell=counted).rows}
    for (spec, trace), ours in product(rows, OURS):
        yield _row(spec, trace, ours, found)
    for spec, (name, place, _), ours in product(jobs, RECORDED, OURS):
        if name not in present:
            yield figure(_title(spec, name, ours), None, "%", better="higher", note=f"data set {place[0]} is absent")


def _cells(spec: str, trace: str) -> list[Cell]:
    """Each policy on one trace."""
    job = parse_cluster(spec)
    about = {"job": spec, "trace": trace, "law": dict(GENERATED).get(trace, "")}
    policies = (*OURS, "checkpoint-restart", "malleus", *(("resihp",) if job.devices <= LEVELS_UP_TO else ()))
    return [
        Cell(study=STUDY, name=f"{spec}, {trace}, {policy}", seed=0, params={**about, "policy": policy}) for policy in policies
    ]


def _measured(cell: Cell) -> Figures:
    """What one policy makes of one trace: effective time and capacity in %, losses, hours."""
    job, trace, name = parse_cluster(cell.params["job"]), cell.params["trace"], cell.params["policy"]
    cluster_events, hours = _played(job, trace)
    outcome = simulate(job, _policy(name, job), cluster_events, SimulationOptions(hours=hours))
    effective, capacity = 100.0 * outcome.effective, 100.0 * outcome.capacity
    facts = {"effective": effective, "capacity": capacity, "losses": float(outcome.failures), "hours": hours}
    return {f"{cell.name}: {fact}": value for fact, value in facts.items()}


def _policy(name: str, job: Job) -> Policy:
    return JointPolicy(levels=job.devices <= LEVELS_UP_TO) if name == "joint" else policy(name)


def _played(job: Job, trace: str) -> tuple[list[ClusterEvent], float]:
    """What happens in a trace, and for how many hours it is played."""
    for name, place, hours in RECORDED:
        if name == trace and (path := datasets.find(*place)) is not None:
            played = min(hours, max(4.0, MOST_DEVICE_HOURS / job.devices)) if hours <= DENSE_UP_TO else hours
            return load_trace(path, job, hours=played), played
    return arrivals(job, parse_faults(dict(GENERATED)[trace]), hours=HOURS, seed=0), HOURS


def _row(spec: str, trace: str, name: str, found: dict[str, float | None]) -> Figure:
    share = {cell.params["policy"]: found[f"{cell.name}: effective"] or 0.0 for cell in _cells(spec, trace)}
    ours = share.pop(name)
    capacity, losses, hours = (found[f"{spec}, {trace}, {name}: {fact}"] for fact in ("capacity", "losses", "hours"))
    note = f"bar: {', '.join(f'{name} {value:.1f}' for name, value in share.items())}; capacity {capacity:.1f}; "
    note += f"{losses:.0f} losses in {hours:g} h"
    return figure(_title(spec, trace, name), ours, "%", bar=share["checkpoint-restart"], better="higher", note=note)


def _title(spec: str, trace: str, name: str) -> str:
    return f"{spec}, {parse_cluster(spec).devices:,} GPUs, {trace}: effective time of {OURS[name]}"
