"""Unskew's policy: never behind what another planner would have chosen, and spare nodes in the place of lost ones."""

from __future__ import annotations

import numpy as np
import pytest

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import healthy
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import parse_cluster
from unskew.analytics.planners.malleus import plan_malleus
from unskew.analytics.policies.base import ClusterView
from unskew.analytics.policies.planning import planned, working
from unskew.analytics.policies.registry import POLICIES
from unskew.analytics.policies.unskew import UnskewPolicy

CLUSTERS = ("llama2-7b,dp=8", "llama2-7b,dp=5,tp=8", "llama2-13b,dp=3", "llama-30b", "qwen2.5-14b,dp=4")


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_it_can_choose_a_plan_as_fast_as_malleus(seed: int) -> None:
    """Nodes gone, devices slow and dead anywhere: groups cut and regrouped per node, pipelines of unequal depth."""
    random = np.random.default_rng(seed)
    job = parse_cluster(str(random.choice(CLUSTERS)))
    speeds = np.ones(job.devices)
    for node in random.choice(job.nodes, int(random.integers(0, job.nodes)), replace=False):
        speeds[node * job.gpus_per_node : (node + 1) * job.gpus_per_node] = 0.0
    hit = random.choice(job.devices, job.devices // 8, replace=False)
    speeds[hit] = np.minimum(speeds[hit], random.choice([0.0, 0.35, 0.6, 0.85], len(hit)))
    cluster = ClusterView(job, 0.0, speeds, {}, healthy(job))
    theirs = working(planned(job, speeds, measured=True), plan_malleus(planned(job, speeds, measured=True)).layout)
    ours = UnskewPolicy(levels=False).candidates(cluster)
    assert min(map(cluster.seconds, ours.values())) <= 1.001 * cluster.seconds(theirs)


def test_a_sound_job_returns_to_its_fastest_plan() -> None:
    """After a repair a plan that loses less than an iteration's noise, 1.5 %, is still not kept for good."""
    job = parse_cluster("llama2-70b")
    events = [ClusterEvent(kind="failed", at_s=3600.0, devices=(5,)), ClusterEvent(kind="joined", at_s=7200.0, devices=(5,))]
    outcome = simulate(job, UnskewPolicy(levels=False), events, SimulationOptions(hours=4.0, noise_cv=0.0))
    degraded, whole = (change.predicted_s for change in outcome.changes)
    assert 0.0 < degraded / whole - 1.0 < UnskewPolicy.least_gain


def test_spares_take_the_place_of_lost_nodes_without_a_restart() -> None:
    """Two nodes of replica 0 and 2 are lost for good; one spare serves for one of them, two for both."""
    job = parse_cluster("llama2-7b,dp=4")
    lost = [
        ClusterEvent(kind="failed", at_s=at_s, devices=tuple(range(first, first + 8)))
        for at_s, first in ((3600.0, 0), (7200.0, 16))
    ]
    outcomes = [
        simulate(job, POLICIES["unskew"](), lost, SimulationOptions(hours=12.0, noise_cv=0.0, spares=spares))
        for spares in range(3)
    ]
    assert [round(outcome.capacity, 2) for outcome in outcomes] == [0.56, 0.79, 1.0]
    assert all(outcome.lost_s["restart"] == 0.0 for outcome in outcomes)
    assert outcomes[0].effective < outcomes[1].effective < outcomes[2].effective
    assert outcomes[2].effective > 0.99
    copying_s = [outcome.lost_s["reconfigure"] for outcome in outcomes]
    assert copying_s[2] > 2 * 15.0 / 10  # the new hardware receives its layers


def test_a_repaired_node_serves_at_once_where_another_is_still_lost() -> None:
    """The spare serves for the first; the first is repaired, is a spare itself, and serves for the second."""
    job = parse_cluster("llama2-7b,dp=4")
    first, second = tuple(range(8)), tuple(range(16, 24))
    events = [
        ClusterEvent(kind="failed", at_s=3600.0, devices=first),
        ClusterEvent(kind="failed", at_s=5400.0, devices=second),
        ClusterEvent(kind="joined", at_s=7200.0, devices=first),
    ]
    outcome = simulate(job, POLICIES["unskew"](), events, SimulationOptions(hours=8.0, noise_cv=0.0, spares=1))
    degraded_s = 1800.0
    assert outcome.capacity == pytest.approx(1.0 - (degraded_s + 30.0) * 0.25 / (8 * 3600.0), abs=2e-3)
