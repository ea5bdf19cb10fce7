"""Each policy reproduces a published figure or worked case of its own before it is compared with others."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS, Job, healthy
from unskew.analytics.cluster.timing import Speeds, fault_free_s, iteration_s, stage_speeds
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout
from unskew.analytics.core.sharing import proportional
from unskew.analytics.lab.simulator.arrivals import FaultLaw, arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.planners.malleus import plan_malleus
from unskew.analytics.policies.base import WAITING, ClusterView, Policy, Reaction, survives
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.nothing import NothingPolicy
from unskew.analytics.policies.papers.adaptra import AdaptraPolicy
from unskew.analytics.policies.papers.bamboo import BambooPolicy
from unskew.analytics.policies.papers.ft_hsdp import FtHsdpPolicy, closed_form
from unskew.analytics.policies.papers.greyhound import GreyhoundPolicy, gathered, shares
from unskew.analytics.policies.papers.malleus import MalleusPolicy
from unskew.analytics.policies.papers.ntp import NtpPolicy
from unskew.analytics.policies.papers.oobleck import OobleckPolicy
from unskew.analytics.policies.papers.recover import MicroBatchShares, RecoverPolicy, boundary, steady
from unskew.analytics.policies.papers.recycle import RecyclePolicy
from unskew.analytics.policies.papers.resihp import ResihpPolicy
from unskew.analytics.policies.planning import planned
from unskew.analytics.policies.registry import POLICIES, PolicyError, policy
from unskew.analytics.policies.restart import RestartPolicy, best_interval_s
from unskew.analytics.policies.unskew import UnskewPolicy

JOB = JOBS["llama2-13b"]
POISSON = FaultLaw(mtbf_s=1080.0)


def bare(**changes: object) -> Job:
    """A job of equal stages without head, messages and all-reduce, so that formulas hold exactly."""
    job = msgspec.structs.replace(JOB, given_iteration_s=10.0, **changes)
    return msgspec.structs.replace(job, name=str(changes))


def ask(
    which: Policy, job: Job, speeds: Speeds, *, kind: str = "failed", layout: Layout | None = None, **known: object
) -> Reaction:
    devices = tuple(np.flatnonzero(speeds < 1.0).tolist())
    cluster = ClusterView(job, 0.0, speeds, {}, layout or healthy(job), **known)  # type: ignore[arg-type]
    return which.react(cluster, ClusterEvent(kind=kind, at_s=0.0, devices=devices))  # type: ignore[arg-type]


def speeds_of(job: Job, changed: dict[int, float]) -> Speeds:
    speeds = np.ones(job.devices)
    speeds[list(changed)] = list(changed.values())
    return speeds


def test_none_dies_with_the_first_device() -> None:
    outcome = simulate(
        JOB,
        NothingPolicy(),
        [ClusterEvent(kind="failed", at_s=3600.0, devices=(3,))],
        SimulationOptions(hours=2.0, noise_cv=0.0),
    )
    assert outcome.aborted_s == pytest.approx(4200.0)  # torch's 10 minutes
    assert outcome.effective == pytest.approx(0.5)
    later = [ClusterEvent(kind="failed", at_s=at_s, devices=(at_s // 3600,)) for at_s in (3600, 5400)]
    dead = simulate(JOB, NothingPolicy(), later, SimulationOptions(hours=2.0, noise_cv=0.0))
    assert (dead.failures, dead.capacity) == (1 + 1, pytest.approx(1 - 0.5 / 32))  # devices go on dying after the job


@pytest.mark.slow
def test_synchronous_restart_has_the_published_efficiency() -> None:
    """B.1.6: (18 - 10) / 18 = 44.4 % with fixed spacing; exp(-D / M) = 57.4 % with Poisson arrivals that restart recovery."""
    job, sync = JOBS["ft-hsdp-98k"], RestartPolicy(None, 600.0, detect_s=0.0, loses_work=False)
    kills = [ClusterEvent(kind="failed", at_s=at_s, devices=(0,)) for at_s in np.arange(0, 36000, 1080).tolist()[:-1]]
    outcome = simulate(job, sync, kills, SimulationOptions(hours=33 * 0.3, spares=10**6, noise_cv=0.0))
    assert round(100 * outcome.effective, 1) == 44.4
    small = bare()
    poisson = arrivals(small, FaultLaw(mtbf_s=1080.0), hours=1000.0, seed=1)
    effective = simulate(small, sync, poisson, SimulationOptions(hours=1000.0, spares=10**6, noise_cv=0.0)).effective
    assert effective == pytest.approx(math.exp(-600 / 1080), abs=0.015)


@pytest.mark.slow
def test_the_checkpoint_interval_is_the_one_that_costs_least() -> None:
    """Meta's ETTR: dt* = sqrt(2 w / rate); the simulator agrees that shorter and longer ones lose more."""
    small, mtbf_s = bare(), 7200.0
    best_s = best_interval_s(0.45, mtbf_s)
    assert best_s == pytest.approx(math.sqrt(2 * 0.45 * 7200))
    kills = arrivals(small, FaultLaw(mtbf_s=mtbf_s), hours=30.0, seed=0)

    def effective(interval_s: float) -> float:
        return simulate(
            small, RestartPolicy(interval_s, 60.0), kills, SimulationOptions(hours=30.0, spares=10**6, noise_cv=0.0)
        ).effective

    assert effective(best_s) > effective(best_s / 8)
    assert effective(best_s) > effective(best_s * 16)


@pytest.mark.slow
def test_ft_hsdp_to_the_last_digit() -> None:
    assert [round(100 * share, 1) for share in closed_form(1080, 600, 12, 180)] == [44.4, 80.1]
    assert round(100 * closed_form(1080, 600, 12, 90)[1], 1) == 87.7
    with_rejoin = closed_form(1080, 600, 12, 180)[1] - 100 / 1080
    assert round(100 * with_rejoin, 1) == 70.8
    job = bare(dp=12, micro_batches=12 * 8)
    kills = [ClusterEvent(kind="failed", at_s=at_s, devices=(0,)) for at_s in np.arange(0, 108000, 1080).tolist()]
    played = simulate(job, FtHsdpPolicy(), kills, SimulationOptions(hours=30.0, noise_cv=0.0))
    assert round(100 * played.effective, 1) == 80.1
    poisson = [
        simulate(
            job,
            FtHsdpPolicy(),
            arrivals(job, FaultLaw(mtbf_s=1080.0), hours=200.0, seed=seed),
            SimulationOptions(hours=200.0, noise_cv=0.0),
        )
        for seed in range(2)
    ]
    assert np.mean([outcome.effective for outcome in poisson]) == pytest.approx(0.818, abs=0.015)


def test_nothing_is_paid_for_a_device_whose_group_is_out_already() -> None:
    """A second death in a group or replica that was given up changes no plan: nobody pauses for it."""
    job = bare(dp=3, micro_batches=48)
    for which in (RecyclePolicy(), FtHsdpPolicy(), RestartPolicy(), OobleckPolicy()):
        first = ask(which, job, speeds_of(job, {0: 0.0}))
        assert first.pauses
        both = ClusterView(job, 60.0, speeds_of(job, {0: 0.0, 1: 0.0}), {}, first.layout or healthy(job))
        second = which.react(both, ClusterEvent(kind="failed", at_s=60.0, devices=(1,)))
        assert (second.layout, second.pauses) == (first.layout, ())


def test_recover_to_the_last_digit() -> None:
    """B.2.4: B = 8192, W = 64, G = 128."""
    assert steady(8192, 63, 128) == MicroBatchShares(131, 62, 70, 0)
    assert [steady(8192, left, 128).each for left in (48, 33, 32)] == [171, 249, 256]
    assert [round(100 * steady(8192, left, 128).excess(8192, left), 1) for left in (63, 48, 32)] == [0.7, 0.2, 0.0]
    assert boundary(8192, 63, 8064) == (3, 61)
    assert steady(12, 5, 1) == MicroBatchShares(3, 4, 0, 1)
    answer = ask(RecoverPolicy(), bare(dp=4, micro_batches=32), speeds_of(bare(dp=4), {0: 0.0}))
    assert answer.layout is not None
    assert [pipeline.micro_batches for pipeline in answer.layout.pipelines] == [11, 11, 10]


def test_recycle_gives_the_lost_stage_to_its_peer_which_then_works_twice() -> None:
    job = bare(dp=2, micro_batches=2 * 64)
    answer = ask(RecyclePolicy(), job, speeds_of(job, {0: 0.0}))
    assert answer.layout is not None
    assert {(move.source, move.stage, move.target) for move in answer.layout.moves} == {(0, 0, 1)}
    ratio = iteration_s(job, answer.layout, speeds_of(job, {0: 0.0})) / fault_free_s(job)
    assert 2 * 64 / (64 + 3) <= ratio < 2.0  # the peer's busy time is the bound
    apart = msgspec.structs.replace(answer.layout, staggered=False)
    assert ratio < iteration_s(job, apart, speeds_of(job, {0: 0.0, 16: 1.0})) / fault_free_s(job) + 1e-9
    assert ask(RecyclePolicy(), job, speeds_of(job, {0: 0.0, 16: 0.0})).layout is None  # as ResiHP's dashes


def test_staggered_optimisers_hide_the_filling_of_a_late_stage() -> None:
    """The last stage works twice: with F = B = W its own 2 M (F + B + W) are the period, without the way of the first to it."""
    job = bare(dp=2, micro_batches=2 * 8)
    layout = ask(RecyclePolicy(staggered=True), job, speeds_of(job, {12: 0.0})).layout
    assert layout is not None
    assert (layout.staggered, layout.schedule) == (True, "zb-h1")
    chunk_s = job.cost.chunks["F"].layer_us * 10 / 1e6
    seconds = [
        iteration_s(job, msgspec.structs.replace(layout, staggered=on), speeds_of(job, {12: 0.0})) for on in (True, False)
    ]
    assert seconds[0] < seconds[1]
    assert seconds[0] >= 2 * 8 * 3 * chunk_s - 1e-9


def test_adaptras_warm_up_forwards_absorb_a_slow_link() -> None:
    """Published: 1.2 to 3.5 times for slow links. A message that takes as long as three forwards, on one link."""
    job = bare(dp=1, micro_batches=32)
    late_s = 3 * job.cost.chunks["F"].layer_us * 10 / 1e6
    links = {(0, 1): late_s}
    cluster = ClusterView(job, 0.0, np.ones(job.devices), links, healthy(job))
    layout = AdaptraPolicy().react(cluster, ClusterEvent(kind="link_slowed", at_s=0.0, link=(0, 1), delay_s=late_s)).layout
    assert layout is not None
    assert layout.pipelines[0].in_flight == (8, 8, 3, 1)  # 1, 3, 3 + 3 + 2, then as memory allows
    assert cluster.seconds(healthy(job)) / cluster.seconds(layout) > 1.2
    assert ask(AdaptraPolicy(), job, speeds_of(job, {0: 0.0})).layout is None


def test_bamboos_group_before_takes_the_stage_and_two_in_a_row_are_fatal() -> None:
    job = bare(dp=2, micro_batches=32)
    answer = ask(BambooPolicy(), job, speeds_of(job, {4: 0.0}))
    assert answer.layout is not None
    assert answer.layout.pipelines[0].groups == (job.group(0, 0), job.group(0, 0), job.group(0, 2), job.group(0, 3))
    assert [one.micro_batches for one in answer.layout.pipelines] == [11, 21]
    assert answer.pauses == (("reconfigure", 20.0),)
    fatal = ask(BambooPolicy(), job, speeds_of(job, {4: 0.0, 8: 0.0}))
    assert fatal.layout is not None
    assert [one.replica for one in fatal.layout.pipelines] == [1]
    assert fatal.pauses == (("reconfigure", 30.0),)


def test_oobleck_takes_the_smaller_template_and_stops_without_a_holder() -> None:
    job = bare()
    answer = ask(OobleckPolicy(), job, speeds_of(job, {0: 0.0}))
    assert answer.layout is not None
    assert [pipeline.layers for pipeline in answer.layout.pipelines] == [(13, 14, 13), (10, 10, 10, 10)]
    assert sum(pipeline.micro_batches for pipeline in answer.layout.pipelines) == job.micro_batches
    alone = Layout((healthy(job).pipelines[0],))
    assert ask(OobleckPolicy(), job, speeds_of(job, {0: 0.0}), layout=alone).layout is None


def test_greyhound_shares_micro_batches_and_moves_on_when_waiting_has_cost_as_much() -> None:
    """S2: min max m_i t_i; with t = 2 : 1 over 12 micro-batches 4 : 8. S3 after the swap's minute has been lost."""
    job = bare(micro_batches=12)
    slow = speeds_of(job, {0: 0.5})
    assert [pipeline.micro_batches for pipeline in shares(healthy(job), job, slow).pipelines] == [4, 8]
    both = speeds_of(job, {0: 0.5, 20: 0.5})
    assert min(stage_speeds(job, gathered(job, both), both)[1]) == 1.0  # the second replica is rid of its straggler
    first = ask(GreyhoundPolicy(), job, both, kind="slowed", slow_since_s={0: 0.0, 20: 0.0})
    assert first.later
    assert first.later[0].kind == "review"
    gain = 1 - iteration_s(job, shares(gathered(job, both), job, both), both) / iteration_s(
        job, first.layout or healthy(job), both
    )
    assert first.later[0].at_s * gain == pytest.approx(60.0)


@pytest.mark.parametrize(("spares", "effective"), [(0, 0.61), (1, 0.98)])
def test_greyhound_restarts_on_a_spare_what_stays_slow(spares: int, effective: float) -> None:
    """One GPU at a tenth of its speed for a day. S4, a checkpoint and 9 minutes of restart, comes when as much is lost; what
    else is lost is false alarms and checkpoints. Without a spare S2 and S3 are all there is."""
    slowed = ClusterEvent(kind="slowed", at_s=0.0, devices=(0,), speed=0.1)
    outcome = simulate(JOB, GreyhoundPolicy(), [slowed], SimulationOptions(hours=24.0, noise_cv=0.0, spares=spares))
    reasons = [change.reaction.reason for change in outcome.changes]
    assert any("S4" in reason for reason in reasons) == bool(spares)
    assert outcome.effective == pytest.approx(effective, abs=0.005)
    if spares:
        restart_s = constant("restart_s") + constant("checkpoint_stall_s")
        waited_s = outcome.lost_s["capacity"] + outcome.lost_s["imbalance"]
        assert (waited_s, outcome.lost_s["restart"]) == pytest.approx((restart_s, restart_s), rel=0.02)


def test_a_slow_node_that_is_whole_again_is_a_spare() -> None:
    """The second slow phase finds the node of the first one, which recovered."""
    events = [
        ClusterEvent(kind="slowed", at_s=0.0, devices=(0,), speed=0.1),
        ClusterEvent(kind="recovered", at_s=8 * 3600.0, devices=(0,)),
        ClusterEvent(kind="slowed", at_s=12 * 3600.0, devices=(16,), speed=0.1),
    ]
    outcome = simulate(JOB, GreyhoundPolicy(), events, SimulationOptions(hours=24.0, noise_cv=0.0, spares=1))
    assert sum("S4" in change.reaction.reason for change in outcome.changes) == 2


def test_strengthened_recycle_hands_work_to_a_slow_peer() -> None:
    """The flaw that ResiHP argues with: rerouting does not know who is slow."""
    job = bare(dp=3, micro_batches=48)
    speeds = speeds_of(job, {0: 0.0, 16: 0.3})
    layout = ask(policy("strengthened-recycle"), job, speeds).layout
    assert layout is not None
    assert {move.target for move in layout.moves} == {1, 2}


def test_ntp_keeps_what_dropping_replicas_loses() -> None:
    """A replica that has lost three of eight devices goes on with five, and with fewer micro-batches."""
    answer = ask(NtpPolicy(), bare(tp=8), speeds_of(bare(tp=8), {0: 0.0, 1: 0.0, 2: 0.0}))
    assert answer.layout is not None
    assert [len(pipeline.groups[0]) for pipeline in answer.layout.pipelines] == [5, 8]  # no power of two is needed


def test_ntp_packs_what_was_hurt_into_the_fewest_replicas() -> None:
    """A device lost in a group of each of three replicas: one replica runs with seven per group, not three."""
    job = bare(tp=8, dp=4)
    layout = ask(NtpPolicy(), job, speeds_of(job, dict.fromkeys((0, 40, 70), 0.0))).layout
    assert layout is not None
    assert [{len(group) for group in pipeline.groups} for pipeline in layout.pipelines] == [{7}, {8}, {8}, {8}]
    assert layout.devices.isdisjoint({0, 40, 70})


def test_malleus_plans_a_straggler_away() -> None:
    """Its objective's worked examples are in test_planners_malleus; here the plan runs and pays."""
    job = bare(dp=2, micro_batches=32)
    slow = speeds_of(job, {0: 1 / 3.8})
    layout = plan_malleus(planned(job, slow, measured=True)).layout
    assert [sum(pipeline.layers) for pipeline in layout.pipelines] == [40, 40]
    assert layout.micro_batches == 32
    assert iteration_s(job, layout, slow) < 0.6 * iteration_s(job, healthy(job), slow)
    assert ask(MalleusPolicy(), job, speeds_of(job, {0: 0.9}), kind="slowed").layout == healthy(job)  # no rate moved by 0.3


def test_resihp_shrinks_the_group_and_shifts_layers() -> None:
    """Equation 4 on one dead of four: TP2, one on standby; the stage of half speed gets fewer layers, in both replicas."""
    job = bare(pp=2, n_layers=36)
    answer = ask(ResihpPolicy(), job, speeds_of(job, {0: 0.0}))
    assert answer.layout is not None
    assert [len(pipeline.groups[0]) for pipeline in answer.layout.pipelines] == [2, 4]
    assert [pipeline.layers for pipeline in answer.layout.pipelines] == [(12, 24), (12, 24)]


def test_migration_pays_where_a_dead_and_a_slow_group_come_together() -> None:
    """Each level over the levels before it and ReCycle, with split backward passes, as docs/research/studies.md says."""
    job = msgspec.structs.replace(JOB, schedule="zb-h1")
    speeds = speeds_of(job, {**dict.fromkeys(job.group(0, 1), 0.0), job.group(1, 3)[1]: 0.5})
    levels = [ResihpPolicy(frozenset(one)) for one in ({"tp"}, {"tp", "pp"}, {"tp", "pp", "dp"})]
    layouts = [ask(which, job, speeds).layout for which in (RecyclePolicy(staggered=True), *levels)]
    seconds = [iteration_s(job, layout, speeds) for layout in layouts if layout is not None]
    assert [round(fault_free_s(job) / each, 2) for each in seconds] == [0.42, 0.52, 0.58, 0.74]


def test_unskew_partitions_per_replica_where_resihp_forces_one() -> None:
    """A.6: a stage at half speed, uniform partition bounds the job; a partition of its own leaves the healthy replica alone."""
    job = bare(pp=2, n_layers=32, micro_batches=16)
    slow = speeds_of(job, dict.fromkeys(job.group(0, 0), 0.5))
    unskew, resihp = (ask(which, job, slow, kind="slowed").layout for which in (UnskewPolicy(), ResihpPolicy()))
    assert unskew is not None
    assert resihp is not None
    assert unskew.pipelines[0].layers != unskew.pipelines[1].layers
    assert iteration_s(job, unskew, slow) < iteration_s(job, resihp, slow) < iteration_s(job, healthy(job), slow)
    keeps = ask(UnskewPolicy(), job, speeds_of(job, {0: 0.999}), kind="slowed")
    assert keeps.layout == healthy(job)
    assert keeps.reason.startswith("plan 0 is the best")


@pytest.mark.parametrize("name", ["resihp", "unskew", "malleus"])
def test_the_last_holder_of_a_layer_takes_the_job_back_to_the_checkpoint(name: str) -> None:
    job = bare()
    both = speeds_of(job, dict.fromkeys((*job.group(0, 0)[:2], *job.group(1, 0)[:2]), 0.0))
    answer = ask(policy(name), job, both)
    assert not survives(ClusterView(job, 0.0, both, {}, healthy(job)))
    assert (answer.redo, answer.pauses[0][0]) == ("checkpoint", "restart")


def test_shares_are_the_best_whole_ones() -> None:
    assert proportional(12, [1.0, 0.4, 1.0], least=1) == [5, 2, 5]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PolicyError, match="checkpoint-restart"):
        policy("pray")
    assert {"none", "checkpoint-restart", "oobleck", "recycle", "greyhound", "adaptra", "malleus", "ntp", "recover", "ft-hsdp",
            "resihp", "resihp-tp", "joint", "unskew", "strengthened-recycle", "strengthened-oobleck", "bamboo",
            "recycle-staggered"} == set(POLICIES)  # fmt: skip


def test_survivors_that_hold_the_model_only_together_are_laid_out_anew() -> None:
    """Of four replicas of 70B each keeps 4 of its 16 groups, and 5 are needed: nothing fits in place, all of them do anew."""
    job = JOBS["llama2-70b"]
    dead = [device for replica in range(4) for stage in range(4, 16) for device in job.group(replica, stage)]
    speeds = speeds_of(job, dict.fromkeys(dead, 0.0))
    answer = ask(JointPolicy(), job, speeds)
    assert answer.layout is not None
    assert answer.redo == "checkpoint"
    assert answer.layout.devices == set(range(job.devices)) - set(dead)
    assert len(answer.layout.pipelines) >= 2  # every layer is held twice
    assert iteration_s(job, answer.layout, speeds) * 0.25 < 1.1 * fault_free_s(job)  # a quarter of the devices
    assert ask(JointPolicy(), job, np.zeros(job.devices)).layout == WAITING
    assert ask(JointPolicy(), job, speeds, kind="joined", layout=WAITING).layout == answer.layout
    assert ask(ResihpPolicy(), job, speeds).layout == WAITING  # no stage 5 anywhere, no whole replica
    ranks_for = ask(UnskewPolicy(), job, speeds)  # as a run that waits for ranks: even replicas, as many as there are ranks for
    assert ranks_for.layout is not None
    assert ranks_for.redo == "checkpoint"
    assert [pipeline.layers for pipeline in ranks_for.layout.pipelines] == [(5,) * 16]
    assert ask(UnskewPolicy(), job, np.zeros(job.devices)).layout == WAITING
