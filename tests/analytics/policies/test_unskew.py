"""Unskew's policy, which is the Scheduler of runs, and the joint planner's: no plan behind what another planner would have
chosen, and spare nodes in the place of lost ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import ChunkTimes, Job, healthy
from unskew.analytics.cluster.timing import iteration_s
from unskew.analytics.core.layout import to_plan
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import parse_cluster
from unskew.analytics.lab.studies.resihp.slow import settled
from unskew.analytics.planners.malleus import plan_malleus
from unskew.analytics.planners.problem import working
from unskew.analytics.policies.base import ClusterView
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.layout_of import layout_of
from unskew.analytics.policies.planning import planned
from unskew.analytics.policies.registry import POLICIES, policy
from unskew.analytics.policies.unskew import UnskewPolicy, state_of
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.recovery import recover

CLUSTERS = ("llama2-7b,dp=8", "llama2-7b,dp=5,tp=8", "llama2-13b,dp=3", "llama-30b", "qwen2.5-14b,dp=4")


@pytest.mark.slow
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
    ours = JointPolicy(levels=False).candidates(cluster)
    assert min(map(cluster.seconds, ours.values())) <= 1.001 * cluster.seconds(theirs)


def single_ranks(dp: int, pp: int, n_layers: int, micro_batches: int, schedule: str) -> Job:
    return Job(
        tp=1, dp=dp, pp=pp, n_layers=n_layers, hidden=1, heads=1, parameters=1e8, micro_batches=micro_batches,
        schedule=schedule, measured=ChunkTimes(forward_us=1000.0, backward_us=2000.0), tp_slowdowns=(1.0,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("job", "hit", "behind"),
    [
        (single_ranks(4, 4, 16, 32, "zb-h1"), {10: 0.0, 14: 0.0}, 0.001),
        (single_ranks(2, 2, 8, 10, "zb-h1"), {1: 0.0, 3: 0.36}, 0.03),
        (single_ranks(2, 2, 8, 10, "1f1b"), {1: 0.0, 3: 0.36}, 0.03),
        (single_ranks(3, 2, 8, 6, "1f1b"), {3: 0.0}, 0.001),
    ],
)
def test_it_is_behind_resihp_where_two_replicas_lend_stages_alone(job: Job, hit: dict[int, float], behind: float) -> None:
    """Dead ranks, a slow one beside them. Of two replicas one is then the only holder of what it was lent, which is left to
    ResiHP; without its levels among the candidates by up to 4 % everywhere."""
    speeds = np.ones(job.devices)
    speeds[[*hit]] = [*hit.values()]
    ours, theirs = (settled(job, POLICIES[name](), speeds) for name in ("unskew", "resihp"))
    assert ours <= (1 + behind) * theirs
    view = ClusterView(job, 0.0, speeds, {}, healthy(job))
    alive = frozenset(np.flatnonzero(speeds).tolist())
    rerouted = recover(to_plan(healthy(job), job.n_layers), {device for device, speed in hit.items() if not speed}, 1)
    proposal, _ = propose(0, rerouted, state_of(view, alive))
    assert proposal is not None
    assert any(one.name == "ResiHP's three levels" for one in proposal.considered) == (behind < 0.01)


@pytest.mark.slow
def test_random_jobs_are_not_behind_resihp() -> None:
    """One to three of 4 to 20 ranks slow or dead: 20 jobs, each schedule."""
    behind = []
    for seed, schedule in product(range(20), ("1f1b", "zb-h1")):
        random = np.random.default_rng(seed)
        dp, pp = int(random.integers(2, 5)), int(random.integers(2, 6))
        job = single_ranks(dp, pp, pp * int(random.choice([1, 2, 4])), dp * int(random.integers(2, 9)), schedule)
        speeds = np.ones(job.devices)
        hit = random.permutation(job.devices)[: int(random.integers(1, 4))]
        speeds[hit] = np.where(random.random(len(hit)) < 0.5, 0.0, random.uniform(0.3, 0.8, len(hit)))
        ours, theirs = (settled(job, POLICIES[name](), speeds) for name in ("unskew", "resihp"))
        behind += [(seed, schedule)] if ours > 1.001 * theirs else []
    assert behind == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least_gain"), [("unskew", 0.03), ("joint", 0.015)])
def test_a_sound_job_returns_to_its_fastest_plan(name: str, least_gain: float) -> None:
    """After a repair the first plan comes back, though the other one loses less than any least gain."""
    job = parse_cluster("llama2-70b")
    events = [ClusterEvent(kind="failed", at_s=3600.0, devices=(5,)), ClusterEvent(kind="joined", at_s=7200.0, devices=(5,))]
    outcome = simulate(job, policy(name), events, SimulationOptions(hours=4.0, noise_cv=0.0))
    degraded, whole = (change.predicted_s for change in outcome.changes[-2:])
    assert 0.0 < degraded / whole - 1.0 < least_gain
    assert outcome.answers[-1].reaction.layout == healthy(job)


def test_a_death_is_answered_as_in_a_run() -> None:
    """Rerouted at once; two iterations later a better plan, by the very functions that the controller calls."""
    job = parse_cluster("llama2-7b")
    dead = ClusterEvent(kind="failed", at_s=3600.0, devices=(5,))
    outcome = simulate(job, UnskewPolicy(), [dead], SimulationOptions(hours=2.0, noise_cv=0.0))
    first = to_plan(healthy(job), job.n_layers)
    rerouted, better = (to_plan(answer.reaction.layout, job.n_layers) for answer in outcome.answers if answer.reaction.layout)
    assert rerouted.digest == recover(first, {5}, 1).digest
    at_s = outcome.answers[1].at_s
    view = ClusterView(job, at_s, np.where(np.arange(job.devices) == 5, 0.0, 1.0), {}, layout_of(rerouted), ends_s=7200.0)
    state = state_of(view, frozenset(range(job.devices)) - {5})
    proposal, _ = propose(round(at_s / view.seconds(view.layout)), rerouted, state)
    assert proposal is not None
    assert better.digest == proposal.plan.digest
    assert iteration_s(job, layout_of(better), view.speeds) == pytest.approx(proposal.predicted_us / 1e6, rel=1e-3)


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
