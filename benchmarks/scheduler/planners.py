"""The planners' figures: worked cases of the papers, distance from the best plan, time to plan up to 98,304 devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean, median

import numpy as np
from support.planning.brute_force import best_us, random_cluster

from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.layout import Layout, to_plan
from unskew.analytics.core.plan import PlanError
from unskew.analytics.core.sharing import share_out
from unskew.analytics.lab.simulator.specs import parse_cluster
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.analytics.planners.costing import chunk_times, pipeline_us
from unskew.analytics.planners.joint.bounds import bounds
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.joint.partition import holds
from unskew.analytics.planners.joint.proof import proven_bound_us
from unskew.analytics.planners.malleus import layers_of, micro_batches_of
from unskew.analytics.planners.problem import PlannerCluster, PlannerJob, group_speeds, healthy_cluster, start
from unskew.analytics.planners.resihp.evaluation import iteration_us
from unskew.analytics.planners.resihp.progressive import plan_progressive
from unskew.analytics.planners.resihp.tp import choose
from unskew.analytics.policies.base import ClusterView
from unskew.analytics.policies.unskew import state_of
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.recovery import recover_with_spares
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

CASES = 300
FIRST_SEED = 10_000
LARGEST = 9
"""Layers and micro-batches of the random jobs, at most."""
FAULTY_SHARE = 0.005
SIZES = (
    ((4, 8, 2), 16, 0.05),
    ((4, 16, 4), 32, 0.15),
    ((8, 8, 16), 128, 1.0),
    ((8, 16, 128), 1024, 10.0),
    ((8, 16, 768), 6144, 60.0),
)
"""(TP, PP, DP), micro-batches, seconds allowed."""

DECISIONS = (("llama-30b", 0.05), ("llama2-70b,dp=16", 1.0))
"""64 and 1,024 devices, seconds allowed."""
DECIDED = {
    "one slow": {5: 0.5},
    "one a little slow": {21: 0.8},
    "one dead": {5: 0.0},
    "three slow, two dead": {5: 0.5, 19: 0.7, 40: 0.8, 10: 0.0, 33: 0.0},
    "a node dead": dict.fromkeys(range(8, 16), 0.0),
}


def figures(_bench: Bench) -> Iterator[Figure]:
    """Every figure, in the order in which they are measured."""
    yield from worked_figures()
    yield from uniform_figures()
    yield from distance_figures()
    yield from order_figures()
    yield from time_figures()
    yield from decision_figures()
    yield from proof_figures()


def worked_figures() -> Iterator[Figure]:
    """Cases that a paper gives or that follow from its equations."""
    cases = {(1, 1, 1): 2, (1, 1, 1, 0.5): 4, (1, 1, 1, 0.4): 2, (1, 1, 1, 0.8): 4, (1, 1, 0.5, 0.5): 4, (1, 1, 0.6): 2}
    wrong = sum(
        choose(speeds, (0.0, 0.25, 0.5, 0.75, 1.0), powers_of_two=True)[0] != degree for speeds, degree in cases.items()
    )
    yield figure("ResiHP equations 3-4: cases decided wrongly", wrong, "of 6", bar=0, better="lower")
    wrong = int(share_out(12, [(0, 1.0), (0, 2.5), (0, 1.0)]) != [5, 2, 5])
    yield figure("ResiHP Figure 5: (4,4,4) -> (5,2,5) missed", wrong, "of 1", bar=0, better="lower")
    first = layers_of([7.22, 3.66, 3.66, 1.9, 1.9, 1.9, 1, 1], 80)[1]
    second = layers_of([7.22, 7.22, 3.66, 1, 1, 1], 80)[1]
    for name, got, known in (
        ("70B, 64 GPUs", micro_batches_of([first, second], [8, 6], 64)[1], 667.0),
        ("60 layers, 32 GPUs", micro_batches_of([22.0, layers_of([3.8, 1, 1, 1], 60)[1], 15.0, 15.0], [4] * 4, 64)[1], 285.0),
    ):
        yield figure(
            f"Malleus' example, {name}: objective off by", abs(got - known), "", bar=0, better="lower", note=f"{got:g}"
        )


def uniform_figures() -> Iterator[Figure]:
    """What one partition for all replicas costs: two stages, four micro-batches, one stage at half speed."""

    def makespan(layers: tuple[int, int], speeds: tuple[float, float]) -> float:
        forward, backward = chunk_times(PlannerJob(n_layers=32, micro_batches=4), np.array([layers]), np.array([speeds]))
        return float(pipeline_us(forward, backward, 4)[0])

    healthy = makespan((16, 16), (1.0, 1.0))
    for name, rate, known in (
        ("as it is", healthy / makespan((16, 16), (0.5, 1.0)), 0.60),
        ("11/21 layers", healthy / makespan((11, 21), (0.5, 1.0)), 0.741),
        ("a healthy replica with 11/21 layers", healthy / makespan((11, 21), (1.0, 1.0)), 0.842),
    ):
        yield figure(
            f"half a stage's speed, {name}: rate off by", abs(round(rate, 3) - known), "", bar=0, better="lower",
            note=f"{rate:.4f} of the healthy rate",
        )  # fmt: skip
    cluster = PlannerCluster(job=PlannerJob(n_layers=32, micro_batches=8), speeds=np.array([[[0.5], [1.0]], [[1.0], [1.0]]]))
    uniform = iteration_us(cluster, plan_progressive(cluster, levels={"tp", "pp"}).layout)
    yield figure(
        "two such replicas, one healthy: own partitions over one for both", uniform / plan_joint(cluster).predicted_us, "x",
        better="higher", note="the same micro-batches in all; the joint planner also divides them unevenly",
    )  # fmt: skip


def distance_figures() -> Iterator[Figure]:
    """The joint planner (no exact search exists in it) against every plan of small jobs."""
    gaps: list[float] = []
    levels: list[float] = []
    bound_gaps: list[float] = []
    levels_failed = invalid = worse = 0
    seed = FIRST_SEED
    while len(gaps) < CASES:
        cluster = random_cluster(np.random.default_rng(seed), largest=LARGEST)
        seed += 1
        best = best_us(cluster)
        if not np.isfinite(best):
            continue
        gaps.append(plan_joint(cluster, compare=False).predicted_us / best - 1.0)
        lower = bounds(cluster)
        invalid += lower.pipelines_us > best * (1 + 1e-9) or lower.capacity_us > best * (1 + 1e-9)
        bound_gaps.append(best / lower.pipelines_us - 1.0)
        present = start(cluster)
        if (cluster.speeds > 0).all() and holds(cluster.job, present):
            worse += plan_joint(cluster).predicted_us > iteration_us(cluster, present) * (1 + 1e-9)
        progressive_us = _levels_us(cluster)
        if np.isfinite(progressive_us):
            levels.append(progressive_us / best - 1.0)
        else:
            levels_failed += 1
    note = (
        f"{CASES} jobs, up to 3 replicas, 4 stages, 4 members, {LARGEST} layers and micro-batches; 60 % of the devices healthy"
    )
    yield figure("joint planner over the best plan, mean", 100 * fmean(gaps), "%", bar=1.0, better="lower", note=note)
    yield figure("joint planner over the best plan, worst", 100 * max(gaps), "%", bar=3.0, better="lower")
    yield figure(
        "ResiHP's levels over the best plan, mean", 100 * fmean(levels), "%", better="lower",
        note=f"median {100 * median(levels):.1f} %, worst {100 * max(levels):.0f} %; no plan within the memory in "
        f"{levels_failed} jobs",
    )  # fmt: skip
    yield figure(
        "jobs in which ResiHP's levels beat all plans of separate pipelines", sum(gap < -1e-9 for gap in levels), "",
        better="lower", note="by lending single stages; the joint planner then takes theirs",
    )  # fmt: skip
    yield figure("jobs in which the joint plan is worse than doing nothing", worse, "", bar=0, better="lower")
    yield figure(
        "jobs in which the lower bound is above the best plan", invalid, "", bar=0, better="lower",
        note=f"best plan over bound: median {100 * median(bound_gaps):.1f} %, mean {100 * fmean(bound_gaps):.1f} %",
    )  # fmt: skip


def order_figures() -> Iterator[Figure]:
    """The runtime's order of a plan's chunks (pipeline/schedule.py) against the planners' own makespan, on small jobs."""
    joint: list[float] = []
    lent: list[float] = []
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        cluster = random_cluster(np.random.default_rng(seed), largest=LARGEST)
        for plan, ratios in ((_joint_only, joint), (_levels, lent)):
            try:
                layout = plan(cluster)
            except PlanError:
                continue
            predicted_us = iteration_us(cluster, layout)
            if np.isfinite(predicted_us) and bool(layout.moves) == (ratios is lent):
                ratios.append(_executed_us(cluster, layout) / predicted_us - 1.0)
    for name, ratios in (("joint plans", joint), ("plans with lent stages", lent)):
        near = sum(abs(ratio) <= 0.01 for ratio in ratios) / len(ratios)
        note = f"{len(ratios)} jobs; from {100 * min(ratios):+.0f} % to {100 * max(ratios):+.0f} %"
        yield figure(f"runtime's order within 1 % of the planners' makespan, {name}", 100 * near, "% of jobs",
                     better="higher", note=note)  # fmt: skip


def _joint_only(cluster: PlannerCluster) -> Layout:
    return plan_joint(cluster, compare=False).layout


def _levels(cluster: PlannerCluster) -> Layout:
    return plan_progressive(cluster).layout


def _executed_us(cluster: PlannerCluster, layout: Layout) -> float:
    """The iteration with the chunks in the order in which ranks execute them."""
    job, schedule = cluster.job, build_schedule(to_plan(layout, cluster.job.n_layers))
    speeds = group_speeds(cluster, layout)
    speed = {
        rank: speeds[d, s] for d, one in enumerate(layout.pipelines) for s, group in enumerate(one.groups) for rank in group
    }
    us = {"F": job.forward_us, "B": job.backward_us}
    work = [
        action.n_layers
        + job.embedding_layers * (action.first_layer == 0)
        + job.head_layers * (action.first_layer + action.n_layers == job.n_layers)
        for action in schedule.order
    ]
    durations = np.array([w * us[a.kind] / speed[a.rank] for w, a in zip(work, schedule.order, strict=True)])
    return float(evaluate(schedule, durations, job.message_us).makespan_us) + job.iteration_end_us


def _levels_us(cluster: PlannerCluster) -> float:
    """The iteration (us) under ResiHP's plan; inf when it has none within the memory."""
    try:
        return iteration_us(cluster, plan_progressive(cluster).layout)
    except PlanError:
        return float("inf")


def faulty_cluster(shape: tuple[int, int, int], micro_batches: int, seed: int) -> PlannerCluster:
    """80 layers; of the devices at least two and 0.5 % are dead or slow, drawn anywhere."""
    tp, pp, dp = shape
    cluster = healthy_cluster(PlannerJob(n_layers=80, micro_batches=micro_batches), tp=tp, pp=pp, dp=dp, devices_per_node=8)
    random = np.random.default_rng(seed)
    speeds = cluster.speeds.ravel().copy()
    faults = max(2, round(len(speeds) * FAULTY_SHARE))
    speeds[random.choice(len(speeds), faults, replace=False)] = random.choice([0.0, 0.5, 0.7, 0.9], faults)
    return cluster.with_speeds(speeds.reshape(cluster.speeds.shape))


def time_figures() -> Iterator[Figure]:
    """A full plan: TP, PP, DP jointly, compared with ResiHP's, with its bound, as a plan that ranks could execute."""
    spent_s, devices = [], []
    for shape, micro_batches, allowed_s in SIZES:
        n = int(np.prod(shape))
        rows = [_planned(faulty_cluster(shape, micro_batches, seed)) for seed in range(3 if n < 10_000 else 1)]
        plan_s = median(row[0] for row in rows)
        devices.append(n)
        spent_s.append(plan_s)
        yield figure(
            f"a full plan for {n:,} devices", plan_s, "s", bar=allowed_s, better="lower",
            note=f"CPU seconds of one core; the first of the process {rows[0][0]:.3f} s; ResiHP's levels alone "
            f"{median(row[1] for row in rows):.3f} s; at most {100 * max(row[2] for row in rows):.1f} % over the best plan",
        )  # fmt: skip
    growth = float(np.polyfit(np.log(devices), np.log(spent_s), 1)[0])
    yield figure("growth: planning time ~ devices to the power of", growth, "", better="lower")


def decision_figures() -> Iterator[Figure]:
    """What the Scheduler of ranks takes to decide: rerouting where somebody died, and a better plan."""
    for spec, allowed_s in DECISIONS:
        job = parse_cluster(spec)
        spent_s = {name: median(_decided_s(job, speeds) for _ in range(3)) for name, speeds in DECIDED.items()}
        worst = max(spent_s, key=spent_s.__getitem__)
        each = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent_s.items())
        yield figure(
            f"a decision of the Scheduler for {job.devices:,} devices, the longest of {len(DECIDED)}", spent_s[worst], "s",
            bar=allowed_s, better="lower", note=f"CPU seconds of one core, the median of three each: {each}",
        )  # fmt: skip


def _decided_s(job: Job, hurt: dict[int, float]) -> float:
    speeds = np.ones(job.devices)
    speeds[[*hurt]] = [*hurt.values()]
    alive = frozenset(np.flatnonzero(speeds > 0.0).tolist())
    plan, state = to_plan(healthy(job), job.n_layers), state_of(ClusterView(job, 0.0, speeds, {}, healthy(job)), alive)
    begun = time.process_time()
    if gone := set(plan.ranks) - alive:
        plan, _ = recover_with_spares(plan, gone, 1, (), lambda _: None)
    propose(0, plan, state)
    return time.process_time() - begun


def proof_figures() -> Iterator[Figure]:
    """How far from the best plan the joint planner can be at most, by integer programs (planners/joint/proof.py)."""
    for shape, micro_batches, _ in SIZES[:3]:
        cluster = faulty_cluster(shape, micro_batches, 0)
        predicted_us = plan_joint(cluster).predicted_us
        begun = time.perf_counter()
        gap = predicted_us / proven_bound_us(cluster, predicted_us) - 1.0
        yield figure(
            f"joint planner over the best plan, {int(np.prod(shape)):,} devices: at most", 100 * gap, "%",
            better="lower", note=f"proved in {time.perf_counter() - begun:.0f} s",
        )  # fmt: skip


def _planned(cluster: PlannerCluster) -> tuple[float, float, float]:
    """(CPU seconds of a full plan, of ResiHP's levels alone, bound of the gap)."""
    begun = time.process_time()
    found = plan_joint(cluster)
    gap = found.predicted_us / bounds(cluster).pipelines_us - 1.0
    to_plan(found.layout, cluster.job.n_layers)
    spent = time.process_time() - begun
    begun = time.process_time()
    plan_progressive(cluster)
    return spent, time.process_time() - begun, gap
