"""The cluster simulator: time adds up, nothing is faster than it can be, seeds repeat, laws and traces are what they say."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.datasets import dataset

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS, healthy
from unskew.analytics.cluster.timing import fault_free_s, iteration_s
from unskew.analytics.core.layout import to_plan
from unskew.analytics.core.plan import validate
from unskew.analytics.lab.simulator.arrivals import FaultLaw, arrivals
from unskew.analytics.lab.simulator.outcome import SimulationOutcome
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import SpecError, parse_cluster, parse_faults
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.resihp.evaluation import iteration_us
from unskew.analytics.policies.base import WAITING
from unskew.analytics.policies.planning import planned
from unskew.analytics.policies.registry import POLICIES
from unskew.edge.failure_trace import load_trace

JOB = JOBS["llama2-13b"]
HARSH = FaultLaw(mtbf_s=5400.0, repair_s=3600.0, slow_per_100_hours=40.0, maintenance_per_100_hours=10.0, correlated_share=0.1)
QUICK = sorted(set(POLICIES) - {"malleus"})  # two integer programs a change: seconds


def play(policy: str, law: FaultLaw = HARSH, *, hours: float = 12.0, seed: int = 0, **options: float) -> SimulationOutcome:
    cluster_events = arrivals(JOB, law, hours=hours, seed=seed)
    return simulate(JOB, POLICIES[policy](), cluster_events, SimulationOptions(hours=hours, seed=seed, **options))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(QUICK),
    seed=st.integers(0, 1000),
    law=st.sampled_from(["exponential", "weibull", "lognormal", "fixed"]),
    scope=st.sampled_from(["device", "node"]),
)
def test_the_time_adds_up_and_no_part_of_it_is_negative(policy: str, seed: int, law: str, scope: str) -> None:
    faults = msgspec.structs.replace(HARSH, law=law, scope=scope)
    outcome = play(policy, faults, seed=seed, noise_cv=0.0, hours=6.0)
    assert outcome.useful_s + sum(outcome.lost_s.values()) + outcome.unexplained_s == pytest.approx(outcome.whole_s)
    assert abs(outcome.unexplained_s) < 1e-6 * outcome.whole_s
    assert outcome.useful_s >= 0
    assert min(outcome.lost_s.values()) >= -1e-6
    done = sum(len(part.seconds) for part in outcome.segments)
    assert done == outcome.iterations
    ends = [float(part.start_s[-1] + part.seconds[-1]) for part in outcome.segments]
    assert ends == sorted(ends)
    assert all(end <= outcome.whole_s + 1e-6 for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("policy", QUICK)
def test_every_answer_is_a_legal_plan_of_the_whole_batch_on_living_devices(policy: str) -> None:
    outcome = play(policy, seed=5)
    whole = planned(JOB, np.ones(JOB.devices), measured=True)
    ideal_s = iteration_us(whole, plan_joint(whole).layout) / 1e6
    for change in outcome.changes:
        layout = change.reaction.layout
        if layout is None or layout == WAITING:
            continue
        validate(to_plan(layout, JOB.n_layers))
        if policy != "ft-hsdp":
            assert layout.micro_batches == JOB.micro_batches
        assert change.predicted_s >= 0.999 * ideal_s * layout.micro_batches / JOB.micro_batches


@pytest.mark.slow
def test_noise_is_the_only_thing_unexplained_and_a_seed_repeats() -> None:
    first, again, quiet = (play("unskew", hours=4.0, **noise) for noise in ({}, {}, {"noise_cv": 0.0}))
    assert msgspec.json.encode(first.facts()) == msgspec.json.encode(again.facts())
    assert 0 < abs(first.unexplained_s) < 2e-3 * first.whole_s
    assert quiet.unexplained_s == pytest.approx(0.0, abs=1e-3)


def test_a_checkpoint_bounds_what_a_failure_costs() -> None:
    kill = [ClusterEvent(kind="failed", at_s=5000.0, devices=(0,))]
    outcome = simulate(JOB, POLICIES["checkpoint-restart"](), kill, SimulationOptions(hours=2.0, noise_cv=0.0, spares=1))
    since_checkpoint_s = 5000.0 - 2 * 1800.0
    assert 0 <= outcome.lost_s["redo"] - (since_checkpoint_s - 0.45) < fault_free_s(JOB)  # and the iteration that had begun
    assert outcome.lost_s["restart"] == 540.0
    assert outcome.lost_s["detection"] == 60.0


def test_a_checkpoint_that_is_due_at_every_death_is_written_after_it() -> None:
    """A death every half hour, at which a checkpoint is due: the last holder of a layer dies, and hours are not lost."""
    kills = [ClusterEvent(kind="failed", at_s=1800.0 * n, devices=(device,)) for n, device in enumerate((12, 8, 28), start=1)]
    outcome = simulate(JOB, POLICIES["checkpoint-restart"](), kills, SimulationOptions(hours=3.0, noise_cv=0.0, spares=9))
    assert outcome.lost_s["redo"] < 3 * 1800.0
    assert outcome.lost_s["checkpoint"] >= 3 * 0.45


def test_checkpoints_come_as_often_as_they_are_asked_for() -> None:
    """Every 600 s instead of every 1800: nine of them in 100 minutes of training, and a failure loses less than 600 s."""
    kill = [ClusterEvent(kind="failed", at_s=5000.0, devices=(0,))]
    options = SimulationOptions(hours=2.0, noise_cv=0.0, spares=1, checkpoint_s=600.0)
    outcome = simulate(JOB, POLICIES["checkpoint-restart"](), kill, options)
    assert outcome.checkpoint_s == 600.0
    assert outcome.lost_s["redo"] < 600.0
    # at 600 .. 4800; the one due at 5400 (restarting) as soon as the job goes on, after it two more
    assert outcome.lost_s["checkpoint"] == pytest.approx(11 * 0.45)
    without = simulate(JOB, POLICIES["recover"](), kill, options)
    assert (without.checkpoint_s, without.lost_s["checkpoint"]) == (None, 0.0)


def test_policies_that_are_compared_meet_the_same_luck() -> None:
    """Of many slow phases a detector that finds half of them finds the same ones under either policy, equally slow."""
    law = FaultLaw(slow_per_100_hours=200.0, slow_forever=True)
    found = []
    for name in ("resihp", "greyhound"):
        policy = POLICIES[name]()
        policy.slow_recall = 0.5
        outcome = simulate(JOB, policy, arrivals(JOB, law, hours=24.0, seed=7), SimulationOptions(hours=24.0, seed=7))
        found.append({answer.event.at_s for answer in outcome.answers if answer.event.kind == "slowed"})
    assert 15 < len(found[0]) < 35
    assert found[0] == found[1]


def test_useful_time_is_that_of_the_committed_iterations_however_often_the_job_falls_back() -> None:
    kills = [ClusterEvent(kind="failed", at_s=at_s, devices=(0,)) for at_s in np.arange(3000.0, 80_000.0, 3001.0).tolist()]
    outcome = simulate(JOB, POLICIES["checkpoint-restart"](), kills, SimulationOptions(hours=24.0, noise_cv=0.0, spares=99))
    assert 0 <= outcome.useful_s - outcome.iterations * fault_free_s(JOB) < fault_free_s(JOB)


def test_a_repaired_node_is_a_spare_again_and_a_job_that_waited_starts_again() -> None:
    """One spare serves failure after failure if the broken node comes back in between; without it the job waits for repair."""
    job = parse_cluster("llama2-13b,dp=1")
    events = [
        ClusterEvent(kind=kind, at_s=at_s, devices=(0,))  # type: ignore[arg-type]
        for kind, at_s in (("failed", 1000.0), ("joined", 2000.0), ("failed", 4000.0), ("joined", 5000.0))
    ]
    spared, waiting = (
        simulate(job, POLICIES["checkpoint-restart"](), events, SimulationOptions(hours=2.0, noise_cv=0.0, spares=spares))
        for spares in (1, 0)
    )
    assert spared.lost_s["restart"] == waiting.lost_s["restart"] == 2 * 540.0
    assert spared.lost_s["stall"] == 0.0
    assert waiting.lost_s["stall"] == pytest.approx(2 * 1000.0)  # 60 s of it pass before the repair is noticed


def test_a_failure_during_recovery_starts_detection_anew() -> None:
    kills = [ClusterEvent(kind="failed", at_s=at_s, devices=(device,)) for at_s, device in ((1000.0, 0), (1300.0, 16))]
    outcome = simulate(JOB, POLICIES["checkpoint-restart"](), kills, SimulationOptions(hours=1.0, noise_cv=0.0, spares=4))
    assert outcome.lost_s["detection"] == pytest.approx(120.0)
    assert outcome.lost_s["restart"] == pytest.approx(240.0 + 540.0)


def effective(error: float) -> float:
    """The mean of four runs in which what is estimated is so much off."""
    return float(np.mean([play("unskew", seed=seed, estimate_error=error).effective for seed in range(4)]))


@pytest.fixture(scope="module")
def with_true_estimates() -> float:
    return effective(0.0)


@pytest.mark.slow
def test_wrong_beliefs_cost_little(with_true_estimates: float) -> None:
    """Speeds, delays and costs wrong by 10 % without the planner's knowing."""
    assert with_true_estimates - 0.02 < effective(0.1) < with_true_estimates + 0.01


@pytest.mark.parametrize("law", ["exponential", "weibull", "lognormal", "fixed"])
def test_laws_have_the_mean_that_they_are_given(law: str) -> None:
    found = arrivals(JOB, FaultLaw(law=law, mtbf_s=600.0), hours=1000.0, seed=1)  # type: ignore[arg-type]
    assert len(found) == pytest.approx(6000, rel=0.05)
    gaps = np.diff([event.at_s for event in found])
    spread = {"exponential": 1.0, "weibull": 1.46, "lognormal": 1.31, "fixed": 0.0}[law]
    assert gaps.std() / gaps.mean() == pytest.approx(spread, abs=0.12)


def test_lemons_fail_more_often_and_a_switch_takes_its_nodes_along() -> None:
    big = parse_cluster("llama2-70b,dp=64")
    found = arrivals(big, FaultLaw(mtbf_s=60.0, lemon_share=0.015), hours=100.0, seed=2)
    per_node = np.bincount([event.devices[0] // 8 for event in found], minlength=big.nodes)
    assert per_node.max() > 4 * np.median(per_node)
    widths = {len(event.devices) for event in arrivals(big, FaultLaw(mtbf_s=60.0, correlated_share=0.3), hours=20.0, seed=2)}
    assert widths == {1, 32 * 8}


def test_a_recorded_trace_is_replayed() -> None:
    for path in (dataset("spot-preemption", "aws-p3-events.csv"), dataset("lanl-failures", "failures.parquet")):
        found = load_trace(path, JOB, hours=10_000.0)
        down: set[int] = set()
        for event in found:
            assert (event.kind == "failed") == down.isdisjoint(event.devices)
            down ^= set(event.devices)
        assert len(found) > 100


def test_a_pool_of_instances_is_that_share_of_the_nodes(tmp_path: Path) -> None:
    """Recorded as counts: nobody knows which of them went, only how many are there."""
    counts = [12, 16, 9, 9, 1, 0, 16]
    path = tmp_path / "counts.csv"
    path.write_text("timestamp,n_instances\n" + "".join(f"2021-12-11T1{i}:00:00.5,{n}\n" for i, n in enumerate(counts)))
    found, down = load_trace(path, JOB, hours=24.0), set[int]()
    for hour, count in enumerate(counts):
        for event in (one for one in found if hour * 3600 <= one.at_s < (hour + 1) * 3600):
            assert (event.kind == "failed") == down.isdisjoint(event.devices)
            down ^= set(event.devices)
        assert JOB.nodes - len({JOB.node(device) for device in down}) == JOB.nodes * count // 16
    path.write_text("timestamp,n_instances\nyesterday,3\n")
    with pytest.raises(SpecError, match="cannot be read"):
        load_trace(path, JOB, hours=1.0)


def test_ten_thousand_iterations_of_256_devices_and_a_day_of_98304_take_seconds() -> None:
    """The figures are benchmarks/scheduler/studies.py's; here a wrong order of growth fails."""
    job = JOBS["llama2-70b"]
    cluster_events = arrivals(job, FaultLaw(mtbf_s=9 * 3600.0, repair_s=7200.0), hours=45.0, seed=0)
    outcome = simulate(job, POLICIES["oobleck"](), cluster_events, SimulationOptions(hours=45.0))
    assert outcome.iterations > 5000
    large = JOBS["ft-hsdp-98k"]
    day = arrivals(large, FaultLaw(mtbf_s=1080.0), hours=6.0, seed=0)
    assert simulate(large, POLICIES["ft-hsdp"](), day, SimulationOptions(hours=6.0)).failures > 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nobody", "is not known"),
        ("llama3,law=normal", "law"),
        ("mtbf_s=-1", "positive"),
        ("mtbf_s=nan", "finite"),
        ("mtbf_s=1e-9", "at least 1"),
        ("llama3,lemon_share=2", "at most 1"),
        ("failures_per_node_day=1e12", "at most 100"),
        ("llama3,repair_s=0", "greater than 0"),
        ("mtbf=3", "is not a setting"),
    ],
)
def test_bad_faults_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        parse_faults(text)


@pytest.mark.parametrize("text", ["gpt-5", "llama2-7b,dp=0", "llama2-7b,zz=3", "llama2-7b,pp=64", "llama2-7b,tp=99999999"])
def test_bad_clusters_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_cluster(text)


def test_a_slow_device_slows_its_replica() -> None:
    speeds = np.ones(JOB.devices)
    speeds[3] = 0.5
    ratio = iteration_s(JOB, healthy(JOB), speeds) / fault_free_s(JOB)
    assert 1.4 < ratio < 2.0  # 8 micro-batches at twice the time against 11 slots; the bubble absorbs the rest
    assert math.isinf(iteration_s(JOB, healthy(JOB), np.where(np.arange(JOB.devices) == 3, 0.0, 1.0)))


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_trace(tmp_path / "none.csv", JOB, hours=1.0)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match="needs the columns"):
        load_trace(tmp_path / "other.csv", JOB, hours=1.0)
