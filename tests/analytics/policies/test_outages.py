"""Whoever has a checkpoint outlives it when all or nearly all are lost, and when more die while the job restarts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS
from unskew.analytics.core.constants import constant
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.policies.registry import POLICIES, policy

JOB = JOBS["llama2-13b"]
RETURNING = [name for name, make in POLICIES.items() if make().checkpoint_s is not None]


@pytest.mark.parametrize("name", RETURNING)
def test_a_total_outage_is_waited_for_and_the_job_trains_again(name: str) -> None:
    """Every node is lost within a minute and comes back an hour later, one by one; nobody with a checkpoint gives up."""
    width = JOB.gpus_per_node
    nodes = [tuple(range(first, first + width)) for first in range(0, JOB.devices, width)]
    lost = [ClusterEvent(kind="failed", at_s=7000.0 + 20 * n, devices=devices) for n, devices in enumerate(nodes)]
    back = [ClusterEvent(kind="joined", at_s=10_600.0 + 60 * n, devices=devices) for n, devices in enumerate(nodes)]
    outcome = simulate(JOB, policy(name), [*lost, *back], SimulationOptions(hours=8.0, noise_cv=0.0))
    assert outcome.aborted_s is None
    assert float(outcome.segments[-1].start_s[-1]) > 8 * 3600 - 60
    assert outcome.lost_s["restart"] >= constant("restart_s")
    assert outcome.lost_s["redo"] > 0  # nobody held anything: since the last checkpoint all is lost
    assert outcome.effective > 0.5  # checkpoint-restart goes on with the first replica that is whole


@pytest.mark.parametrize("name", RETURNING)
def test_a_death_during_a_restart_begins_it_anew_and_one_elsewhere_does_not_end_it(name: str) -> None:
    """Both replicas lose a stage; then a device of what is being loaded dies, and one that nobody uses."""
    job = msgspec.structs.replace(JOB, given_iteration_s=10.0, dp=3, micro_batches=48, name="of three")
    half = constant("restart_s") / 2
    first = ClusterEvent(kind="failed", at_s=3000.0, devices=tuple(job.group(replica, 1)[0] for replica in range(3)))
    once = simulate(job, policy(name), [first], SimulationOptions(hours=2.0, noise_cv=0.0))
    change = next(answer for answer in once.answers if answer.acts)
    assert change.reaction.layout is not None
    used = change.reaction.layout.devices
    if used:
        again = ClusterEvent(kind="failed", at_s=change.at_s + half, devices=(min(used),))
        twice = simulate(job, policy(name), [first, again], SimulationOptions(hours=2.0, noise_cv=0.0))
        assert twice.lost_s["restart"] >= once.lost_s["restart"] + half - 1e-6
    idle = sorted(set(range(job.devices)) - used - set(first.devices))
    if idle and used:
        aside = ClusterEvent(kind="failed", at_s=change.at_s + half, devices=(idle[0],))
        beside = simulate(job, policy(name), [first, aside], SimulationOptions(hours=2.0, noise_cv=0.0))
        assert beside.lost_s["restart"] >= once.lost_s["restart"] - 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_waiting_and_laying_out_anew_is_never_worse_than_restarting_whole_replicas(seed: int) -> None:
    """Traces of its own: groups of nodes die together, all at once now and then, and come back after minutes or never."""
    random = np.random.default_rng(seed)
    job = msgspec.structs.replace(JOB, dp=int(random.integers(2, 5)), name=f"llama2-13b,{seed}")
    job = msgspec.structs.replace(job, micro_batches=8 * job.dp)
    events, down, now_s = list[ClusterEvent](), set[int](), 0.0
    returns = seed % 4 != 3
    while (now_s := now_s + random.exponential(1200.0)) < 3 * 3600.0:
        alive = sorted(set(range(job.nodes)) - down)
        if alive and (random.random() < 0.5 or not down):
            count = len(alive) if random.random() < 0.1 else int(random.integers(1, min(3, len(alive)) + 1))
            chosen, kind = random.choice(alive, count, replace=False).tolist(), "failed"
            down |= set(chosen)
        elif returns:
            chosen, kind = random.choice(sorted(down), int(random.integers(1, len(down) + 1)), replace=False).tolist(), "joined"
            down -= set(chosen)
        else:
            continue
        width = job.gpus_per_node
        events += [
            ClusterEvent(kind=kind, at_s=now_s, devices=tuple(range(n * width, (n + 1) * width)))  # type: ignore[arg-type]
            for n in chosen
        ]
    ours, plain = (
        simulate(job, policy(name), events, SimulationOptions(hours=3.0)) for name in ("unskew", "checkpoint-restart")
    )
    assert ours.effective >= plain.effective
    assert ours.aborted_s is None
