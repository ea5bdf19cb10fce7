"""The sessions of faults that ResiHP's table 6 and figures 10 and 11 share: models x intervals, and how a policy plays one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS, Job
from unskew.analytics.lab.simulator.outcome import SimulationOutcome
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.studies.frame import Cell, Figures
from unskew.analytics.lab.studies.resihp.paper import PAPER
from unskew.analytics.policies.base import Policy

Make = Callable[[], Policy]

SCHEDULE = "zb-h1"
"""Of all jobs of ResiHP's studies and of every policy in them. The paper evaluates 1F1B and ZBH and does not say which its
throughputs have; only with a split backward pass can its Figure 6 end after 20 slots (tests/analytics/planners/
test_progressive.py), and a policy that splits it only after a fault would be faster than the whole job."""


def model_of(figure: str) -> str:
    """The model that a figure of these studies is about."""
    return figure.split(maxsplit=1)[0]


def job_of(model: str) -> Job:
    """The job behind one of the paper's abbreviations."""
    return played(PAPER.models[model])


def played(name: str) -> Job:
    """A job of clusters.toml as these studies play it."""
    return msgspec.structs.replace(JOBS[name], schedule=SCHEDULE)


def kills(job: Job, interval_s: float, hours: float, seed: int, *, slow: float | None = None) -> list[ClusterEvent]:
    """One living GPU dies at the end of every interval; with `slow`, every other event slows a healthy one to that speed."""
    random = np.random.default_rng(seed)
    order = random.permutation(job.devices).tolist()
    events = []
    for number, device in enumerate(order[: int(hours * 3600.0 / interval_s)]):
        at_s = (number + 1) * interval_s
        if slow is not None and number % 2:
            events.append(ClusterEvent(kind="slowed", at_s=at_s, devices=(device,), speed=slow))
        else:
            events.append(ClusterEvent(kind="failed", at_s=at_s, devices=(device,)))
    return events


def cells(study: str) -> Callable[[int], list[Cell]]:
    """A cell per model, interval and seed."""

    def of_seeds(seeds: int) -> list[Cell]:
        return [
            Cell(study=study, name=f"{model} {interval}", seed=seed, params={"model": model, "interval": interval})
            for model in PAPER.models
            for interval in PAPER.interval_hours
            for seed in range(seeds)
        ]

    return of_seeds


def scene(cell: Cell) -> tuple[Job, float, float]:
    """The job, the interval in seconds and the session in hours."""
    job = job_of(cell.params["model"])
    return job, PAPER.interval_hours[cell.params["interval"]] * 3600.0, PAPER.session_hours[job.devices]


def aborted(name: str, outcome: SimulationOutcome) -> Figures:
    """Whether the session aborted, which over seeds is a share. One rule for all of these studies: it counts as what it trained
    until then over the whole session. The paper has a dash for it in table 6, and does not say how its ratios count one."""
    return {f"{name}: sessions that aborted": float(outcome.aborted_s is not None)}


def play(job: Job, make: Make, cluster_events: list[ClusterEvent], hours: float, seed: int) -> SimulationOutcome:
    """What a fresh policy makes of the session."""
    return simulate(job, make(), cluster_events, SimulationOptions(hours=hours, seed=seed))
