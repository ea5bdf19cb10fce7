"""Generators of cluster events: when devices die, turn slow, and come back. Each is a pure function of its law and a seed.

Laws of the time between events: exponential (the papers' assumption), Weibull (shape < 1: failures cluster after a repair),
log-normal. On top: correlated groups (a switch takes its nodes along), repeat offenders ("lemon" nodes), repairs with a
log-normal time, slow phases with a log-normal duration, maintenance with notice, fixed spacing (the convention of papers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.core.constants import constant

Law = Literal["exponential", "weibull", "lognormal", "fixed"]


class FaultLaw(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per node-day (failures) and per 100 job-hours (slow phases, links); None or 0 = does not happen.

    `mtbf_s` gives the job's own time between failures instead of a rate. `repair_s` None = a dead device never comes back.
    `scope`: what a failure takes: one device, or its whole node.
    """

    law: Law = "exponential"
    failures_per_node_day: float = 0.0
    mtbf_s: float | None = None
    repair_s: float | None = None
    scope: Literal["device", "node"] = "device"
    slow_per_100_hours: float = 0.0
    slow_forever: bool = False
    links_per_100_hours: float = 0.0
    link_delay_s: float = 0.0
    maintenance_per_100_hours: float = 0.0
    correlated_share: float = 0.0
    lemon_share: float = 0.0


def arrivals(job: Job, law: FaultLaw, *, hours: float, seed: int) -> list[ClusterEvent]:
    """Everything that happens within `hours`, in order of time."""
    random = np.random.default_rng(seed)
    end_s = hours * 3600.0
    found: list[ClusterEvent] = []
    mean_s = law.mtbf_s
    if mean_s is None and law.failures_per_node_day > 0:
        mean_s = 86400.0 / (law.failures_per_node_day * job.nodes)
    if mean_s is not None:
        found += _failures(job, law, _times(law.law, mean_s, end_s, random), random)
    for rate, make in (
        (law.slow_per_100_hours, _slow),
        (law.links_per_100_hours, _link),
        (law.maintenance_per_100_hours, _host),
    ):
        if rate > 0:
            for at_s in _times("exponential", 360000.0 / rate, end_s, random):
                found += make(job, law, float(at_s), random)
    return sorted((one for one in found if one.at_s < end_s), key=lambda one: one.at_s)


def _times(law: Law, mean_s: float, end_s: float, random: np.random.Generator) -> np.ndarray:
    """Moments of a renewal process with this mean gap."""
    if law == "fixed":
        return np.arange(mean_s, end_s, mean_s)
    count = int(end_s / mean_s * 1.5 + 8 * math.sqrt(end_s / mean_s) + 20)
    shape, sigma = constant("weibull_shape"), constant("lognormal_sigma")
    gaps: Callable[[], np.ndarray] = {
        "exponential": lambda: random.exponential(mean_s, count),
        "weibull": lambda: random.weibull(shape, count) * mean_s / math.gamma(1 + 1 / shape),
        "lognormal": lambda: random.lognormal(math.log(mean_s) - sigma**2 / 2, sigma, count),
    }[law]
    times = np.cumsum(gaps())
    while times[-1] < end_s:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps())])
    return times[times < end_s]


def _failures(job: Job, law: FaultLaw, times: np.ndarray, random: np.random.Generator) -> list[ClusterEvent]:
    weights = np.ones(job.nodes)
    weights[random.random(job.nodes) < law.lemon_share] = constant("lemon_factor")
    nodes = random.choice(job.nodes, len(times), p=weights / weights.sum())
    found = []
    for at_s, node in zip(times, nodes, strict=True):
        if random.random() < law.correlated_share:
            width = min(int(constant("correlated_nodes")), job.nodes)
            first = int(node) - int(node) % width
            devices = _nodes(job, range(first, min(first + width, job.nodes)))
        elif law.scope == "node":
            devices = _nodes(job, [int(node)])
        else:
            members = _nodes(job, [int(node)])
            devices = (members[int(random.integers(len(members)))],)
        found.append(ClusterEvent(kind="failed", at_s=float(at_s), devices=devices))
        if law.repair_s is not None:
            back = float(random.lognormal(math.log(law.repair_s), constant("repair_sigma")))
            found.append(ClusterEvent(kind="joined", at_s=float(at_s) + back, devices=devices, why="repaired"))
    return found


def _nodes(job: Job, nodes: range | list[int]) -> tuple[int, ...]:
    width = job.gpus_per_node
    return tuple(device for node in nodes for device in range(node * width, min((node + 1) * width, job.devices)))


def _slow(job: Job, law: FaultLaw, at_s: float, random: np.random.Generator) -> list[ClusterEvent]:
    devices = (int(random.integers(job.devices)),)
    speed = float(random.uniform(constant("slow_speed_low"), constant("slow_speed_high")))
    begun = ClusterEvent(kind="slowed", at_s=at_s, devices=devices, speed=speed)
    if law.slow_forever:
        return [begun]
    return [begun, ClusterEvent(kind="recovered", at_s=at_s + _duration(random), devices=devices)]


def _link(job: Job, law: FaultLaw, at_s: float, random: np.random.Generator) -> list[ClusterEvent]:
    link = (int(random.integers(job.dp)), int(random.integers(max(1, job.pp - 1))))
    return [
        ClusterEvent(kind="link_slowed", at_s=at_s, link=link, delay_s=law.link_delay_s),
        ClusterEvent(kind="link_recovered", at_s=at_s + _duration(random), link=link),
    ]


def _host(job: Job, _law: FaultLaw, at_s: float, random: np.random.Generator) -> list[ClusterEvent]:
    devices = _nodes(job, [int(random.integers(job.nodes))])
    return [
        ClusterEvent(kind="maintenance", at_s=at_s, devices=devices),
        ClusterEvent(kind="joined", at_s=at_s + constant("maintenance_s"), devices=devices, why="maintenance is over"),
    ]


def _duration(random: np.random.Generator) -> float:
    return float(random.lognormal(math.log(constant("slow_median_s")), constant("slow_sigma")))
