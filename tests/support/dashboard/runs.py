"""Runs as the dashboard may meet them: healthy, slow with an open proposal, repaired by a person, after a death."""

from __future__ import annotations

import msgspec
from support.dashboard.store import COST, FIRST, RunWriter

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import (
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    Mode,
    Party,
    PlanApproved,
    PlanExpired,
    PlanProposed,
    PlanScored,
    RunFinished,
    Verdict,
    VerdictScored,
)
from unskew.collector.paths import Store


def healthy(store: Store, run: str = "healthy", iterations: int = 60) -> RunWriter:
    """Nothing wrong."""
    writer = RunWriter(store, run)
    writer.train(iterations)
    return writer


def slow(store: Store, run: str = "slow", *, mode: Mode = "approve") -> RunWriter:
    """Rank 3 at 1/1.8 of its speed from iteration 30 on; a verdict, and a proposal that waits for a person."""
    writer = RunWriter(store, run, mode=mode)
    writer.train(30)
    writer.control(FaultInjected(kind="slow", rank=3, at_iteration=30, factor=1.8))
    writer.speeds = {3: {"F": 0.556, "B": 0.556}}
    writer.train(4)
    writer.control(slow_verdict())
    writer.estimated_speeds = {3: {"F": 0.55, "B": 0.55}}
    writer.control(proposal(repartitioned(1)))
    writer.train(26)
    return writer


def repaired(store: Store, run: str = "repaired") -> RunWriter:
    """`slow`, then approved by a person, applied and scored."""
    writer = slow(store, run)
    writer.control(PlanApproved(proposal="p1", by="mira", reason="worth it, the run has hours to go"), actor="mira")
    writer.apply(repartitioned(1), "p1", "rank 3 is slow")
    writer.train(14)
    writer.control(
        _score(writer.plan, "p1", writer.iteration),
        VerdictScored(
            verdict=1,
            correct=True,
            truth="slow rank 3 at 30",
            delay_iterations=3,
            onset_error_iterations=0,
            speed_error=0.006,
        ),
    )
    writer.train(6)
    return writer


def after_death(store: Store, run: str = "death") -> RunWriter:
    """`repaired` by itself in mode auto, then rank 6 dies; its micro-batches are rerouted at once; the run ends."""
    writer = slow(store, run, mode="auto")
    writer.control(PlanApproved(proposal="p1", by="auto", reason="gain 21 %, repaid after 2 iterations"))
    writer.apply(repartitioned(1), "p1", "rank 3 is slow")
    writer.train(20)
    writer.control(_score(writer.plan, "p1", writer.iteration))
    _death(writer, recover(repartitioned(1), {6}, 2), "p2")
    writer.train(40)
    writer.control(RunFinished(status="done", iterations=writer.iteration))
    return writer


def waiting_after_death(store: Store, run: str = "waiting") -> RunWriter:
    """`slow`, and before anybody has decided rank 6 dies: its work is rerouted at once, which voids the proposal; a better plan
    for those who are left waits for a person."""
    writer = slow(store, run)
    writer.control(PlanExpired(proposal="p1", reason="rank 6 was lost"))
    _death(writer, recover(FIRST, {6}, 1), "p2")
    writer.train(4)
    better = recover(repartitioned(1), {6}, 2)
    writer.control(msgspec.structs.replace(proposal(better), proposal="p3", verdict=2, at_iteration=writer.iteration))
    writer.train(2)
    return writer


def _death(writer: RunWriter, plan: Plan, name: str) -> None:
    """Rank 6 dies, and `plan` goes on without it."""
    at = writer.iteration
    writer.control(
        FaultInjected(kind="kill", rank=6, at_iteration=at),
        DeviceLost(device="device-6", rank=6, how="exit", detail="the process was killed by signal 9", detected_us=1),
        Verdict(
            verdict=2,
            cause="dead",
            culprits=(Party(kind="device", rank=6),),
            since_iteration=at,
            at_iteration=at,
            confidence=1.0,
            victims=tuple(Party(kind="device", rank=rank) for rank in (4, 5, 7)),
            evidence={"exit": "signal 9"},
            sentence=f"Rank 6 is dead since iteration {at}: its process was killed by signal 9.",
        ),
    )
    writer.control(
        PlanProposed(
            proposal=name,
            plan_version=plan.plan_version,
            digest=plan.digest,
            optional=False,
            reason="rank 6 is dead; its layers are held by rank 2",
            verdict=2,
            plan=plan.to_data(),
            predicted_us=_iteration_us(plan),
            baseline_us=None,
            gain_percent=None,
            cost_us=180_000,
            payback_iterations=None,
            at_iteration=at,
            change="micro-batches of replica 1 pass through replica 0 for layers 8–11",
        )
    )
    writer.apply(plan, name, "rank 6 is dead")


def rejoined(store: Store, run: str = "rejoined", *, joins: bool) -> RunWriter:
    """Rank 6 dies, its layers are held by rank 2, and it comes back: it joins, or the next plan just gives it layers again."""
    writer = healthy(store, run, 20)
    writer.control(
        DeviceLost(device="device-6", rank=6, how="exit", detail="killed by signal 9", detected_us=1),
        Verdict(
            verdict=1,
            cause="dead",
            culprits=(Party(kind="device", rank=6),),
            since_iteration=20,
            at_iteration=20,
            confidence=1.0,
            victims=(),
            evidence={},
            sentence="rank(s) 6 are lost",
        ),
    )
    writer.apply(recover(FIRST, {6}, 1), "", "rank 6 is dead")
    writer.train(10)
    if joins:
        writer.control(DeviceJoined(device="device-6", rank=6, node="local", pid=2006))
    else:
        writer.apply(FIRST.renumbered(2), "", "rank 6 is back")
    writer.train(10)
    return writer


def repartitioned(plan_version: int) -> Plan:
    """Fewer layers and fewer micro-batches for rank 3."""
    return plan_from_partition(
        plan_version=plan_version,
        n_layers=16,
        schedule="1f1b",
        members=[range(4), range(4, 8)],
        layers=[(5, 5, 4, 2), (4, 4, 4, 4)],
        micro_batches=(7, 9),
    )


def proposal(plan: Plan) -> PlanProposed:
    before_us, after_us = _iteration_us(FIRST), _iteration_us(plan)
    return PlanProposed(
        proposal="p1",
        plan_version=plan.plan_version,
        digest=plan.digest,
        optional=True,
        reason="Rank 3 is slow: give it fewer layers.",
        verdict=1,
        plan=plan.to_data(),
        predicted_us=after_us,
        baseline_us=before_us,
        gain_percent=round(100 * (1 - after_us / before_us), 1),
        cost_us=640_000,
        payback_iterations=2,
        at_iteration=34,
        change="rank 3: 4 → 2 layers; replica 0: 8 → 7 micro-batches",
    )


def _iteration_us(plan: Plan) -> int:
    """A typical iteration while rank 3 is slow."""
    return int(predict_iteration(plan, [Work(tokens=490, sum_sq=80_000)] * 16, COST, {3: {"F": 0.55, "B": 0.55}}).iteration_us)


def slow_verdict() -> Verdict:
    return Verdict(
        verdict=1,
        cause="slow_device",
        culprits=(Party(kind="device", rank=3),),
        since_iteration=30,
        at_iteration=33,
        victims=tuple(Party(kind="device", rank=rank) for rank in (0, 1, 2)),
        speed={"F": 0.55, "B": 0.55},
        confidence=0.99,
        evidence={"ratio": 1.81, "peers": 1.0},
        sentence="Rank 3 runs at 0.55 of its healthy speed since iteration 30.",
    )


def _score(plan: Plan, name: str, iteration: int) -> PlanScored:
    predicted_s, baseline_s = _iteration_us(plan) / 1e6, _iteration_us(FIRST) / 1e6
    effect_s = round(baseline_s - predicted_s - 0.02, 3)
    return PlanScored(
        plan_version=plan.plan_version,
        proposal=name,
        from_iteration=iteration - 14,
        to_iteration=iteration - 1,
        n=14,
        predicted_s=predicted_s,
        baseline_s=baseline_s,
        measured_s=predicted_s + 0.02,
        effect_s=effect_s,
        interval_s=(effect_s - 0.02, effect_s + 0.02),
    )
