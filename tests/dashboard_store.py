"""A store with runs as a real one leaves them, written through the collector's own writers: what the dashboard's tests look at.

Times come from the pipeline model with a little seeded noise, so that the page's figures hang together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from unskew.analytics.plan import Plan, plan_from_partition, uniform_plan
from unskew.analytics.prediction import predict_iteration
from unskew.analytics.profiles import profile
from unskew.analytics.recovery import recover
from unskew.analytics.workload import Work, work_of
from unskew.collector.control_stream import ControlStream
from unskew.collector.events import (
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    IterationCommitted,
    IterationJudged,
    MicroBatchPacked,
    Mode,
    Party,
    PlanApplied,
    PlanApproved,
    PlanProposed,
    PlanScored,
    PredictorFitted,
    RankRatio,
    Regrouped,
    RunFinished,
    RunStarted,
    Span,
    Verdict,
    VerdictScored,
)
from unskew.collector.paths import Store
from unskew.collector.spool import SpoolWriter

COST = profile("steady")
WARM_UP = 6


class RunWriter:
    """Writes one run iteration by iteration; `speeds` is the truth, `believed` what the detector knows."""

    def __init__(self, store: Store, run: str, *, mode: Mode = "auto", iterations: int = 180, incarnation: int = 1) -> None:
        self.random = random.Random(run)
        self.run, self.iteration, self.clock_us = run, 0, 0
        self.plan = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
        self.speeds: dict[int, dict[str, float]] = {}
        self.believed: dict[int, dict[str, float]] = {}
        self.stream = ControlStream(store, run, "control", f"controller.{incarnation}")
        self.telemetry = SpoolWriter(store, run, f"rank-0000.{incarnation}")
        self.control(
            RunStarted(
                run=run, device="sleep", clock="monotonic", mode=mode, ranks=8, options={"iterations": iterations, "pp": 4, "dp": 2},
                code="0f3a", version="0.1.0",
            ),
            *(DeviceJoined(device=f"device-{rank}", rank=rank, node="local", pid=1000 + rank) for rank in range(8)),
            self._applied(self.plan, "", "the plan the run starts with"),
        )  # fmt: skip

    def control(self, *events: Control, actor: str = "controller") -> None:
        self.stream.append(self.stream.version, events, actor=actor)

    def apply(self, plan: Plan, proposal: str, reason: str) -> None:
        self.plan = plan
        self.control(self._applied(plan, proposal, reason), Regrouped(
            epoch=plan.epoch, iteration=self.iteration, seconds=0.18, migrate_seconds=0.05, moved_bytes=2_400_000,
        ))  # fmt: skip

    def train(self, iterations: int) -> None:
        """Commit that many iterations."""
        for _ in range(iterations):
            self._iterate()

    def close(self) -> None:
        self.telemetry.close()
        self.stream.close()

    def _iterate(self) -> None:
        lengths = [self._lengths() for _ in self.plan.routes]
        works = [work_of(documents) for documents in lengths]
        truth = predict_iteration(self.plan, works, COST, self.speeds)
        measured_us = int(truth.iteration_us * self.random.uniform(1.0, 1.02) + 9_000)
        predicted_us = int(predict_iteration(self.plan, works, COST, self.believed).iteration_us + 14_000)
        fitted = self.iteration >= WARM_UP
        if self.iteration == WARM_UP:
            self.control(PredictorFitted(
                predictor=1, watermark=self.iteration - 1, model=_plain(COST), n_chunks=768, error_percent={"F": 1.3, "B": 1.1},
                trigger="warm-up",
            ))  # fmt: skip
        for number, documents in enumerate(lengths):
            self.telemetry.append(
                MicroBatchPacked(iteration=self.iteration, micro_batch=number, attempt=0, lengths=tuple(documents))
            )
        self._spans(works)
        for rank in self.plan.ranks:
            self.telemetry.append(
                IterationCommitted(
                    iteration=self.iteration, epoch=self.plan.epoch, attempt=0, rank=rank, loss=self._loss(), log_complete=True,
                    tokens=sum(work.tokens for work in works), start_us=self.clock_us, wall_us=measured_us,
                )
            )  # fmt: skip
        judged = IterationJudged(
            iteration=self.iteration, epoch=self.plan.epoch, measured_us=measured_us, predicted_us=predicted_us if fitted else None,
            ranks=self._ratios(works) if fitted else (),
        )  # fmt: skip
        self.telemetry.append(judged)
        self.iteration += 1
        self.clock_us += measured_us

    def _lengths(self) -> list[int]:
        lengths: list[int] = []
        while sum(lengths) < 440:
            lengths.append(min(self.random.choice((24, 60, 110, 180, 320)), 512 - sum(lengths)))
        return lengths

    def _loss(self) -> float:
        return round(1.9 + 3.6 * 0.985**self.iteration + 0.02 * random.Random(self.iteration).uniform(-1, 1), 4)

    def _ratios(self, works: Sequence[Work]) -> tuple[RankRatio, ...]:
        ratios = []
        for rank in self.plan.ranks:
            predicted = {"F": 0.0, "B": 0.0}
            for route, work in zip(self.plan.routes, works, strict=True):
                for hop in route.hops:
                    if hop.rank == rank:
                        for kind in predicted:
                            predicted[kind] += COST.chunk_us(kind, work, hop.n_layers, has_head=False)
            off = {kind: self.random.gauss(1.0, 0.012) / self.speeds.get(rank, {}).get(kind, 1.0) for kind in predicted}
            ratios.append(
                RankRatio(
                    rank=rank, f=off["F"], b=off["B"], score=max(off.values()) - 1, predicted_us=int(sum(predicted.values())),
                    measured_us=int(sum(predicted[kind] * off[kind] for kind in predicted)),
                )
            )  # fmt: skip
        return tuple(ratios)

    def _spans(self, works: Sequence[Work]) -> None:
        timeline = predict_iteration(self.plan, works, COST, self.speeds).timeline
        for action, start, end in zip(timeline.schedule.order, timeline.start_us, timeline.end_us, strict=True):
            self.telemetry.append(
                Span(
                    kind=action.kind, device=f"device-{action.rank}", rank=action.rank, epoch=self.plan.epoch, attempt=0,
                    iteration=self.iteration, micro_batch=action.micro_batch, first_layer=action.first_layer,
                    n_layers=action.n_layers, start_us=self.clock_us + int(start), wall_us=int((end - start) * 1.01),
                    compute_us=int(end - start),
                )
            )  # fmt: skip

    def _applied(self, plan: Plan, proposal: str, reason: str) -> PlanApplied:
        return PlanApplied(
            epoch=plan.epoch,
            digest=plan.digest,
            proposal=proposal,
            iteration=self.iteration,
            reason=reason,
            plan=plan.to_data(),
        )


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
    writer.control(_slow_verdict())
    writer.believed = {3: {"F": 0.55, "B": 0.55}}
    writer.control(proposal(repartitioned(1)))
    writer.train(26)
    return writer


def repaired(store: Store, run: str = "repaired") -> RunWriter:
    """`slow`, then approved by a person, applied and scored."""
    writer = slow(store, run)
    writer.control(PlanApproved(proposal="p1", by="mira", reason="worth it, the run has hours to go"), actor="mira")
    writer.apply(repartitioned(1), "p1", "rank 3 is slow")
    writer.train(14)
    writer.control(_score(1, "p1", writer.iteration), VerdictScored(
        verdict=1, correct=True, truth="slow rank 3 at 30", delay_iterations=3, onset_error_iterations=0, speed_error=0.006,
    ))  # fmt: skip
    writer.train(6)
    return writer


def after_death(store: Store, run: str = "death") -> RunWriter:
    """`repaired` by itself in mode auto, then rank 6 dies; its micro-batches are rerouted at once; the run ends."""
    writer = slow(store, run, mode="auto")
    writer.control(PlanApproved(proposal="p1", by="auto", reason="gain 21 %, repaid after 2 iterations"))
    writer.apply(repartitioned(1), "p1", "rank 3 is slow")
    writer.train(20)
    writer.control(_score(1, "p1", writer.iteration))
    writer.control(
        FaultInjected(kind="kill", rank=6, at_iteration=80),
        DeviceLost(device="device-6", rank=6, how="exit", detail="the process was killed by signal 9", detected_us=1),
        Verdict(
            verdict=2, cause="dead", culprits=(Party(kind="device", rank=6),), since_iteration=80, at_iteration=80, confidence=1.0,
            victims=tuple(Party(kind="device", rank=rank) for rank in (4, 5, 7)), evidence={"exit": "signal 9"},
            sentence="Rank 6 is dead since iteration 80: its process was killed by signal 9.",
        ),
    )  # fmt: skip
    plan = recover(repartitioned(1), {6}, 2)
    writer.control(
        PlanProposed(
            proposal="p2", epoch=2, digest=plan.digest, optional=False, reason="rank 6 is dead; its layers are held by rank 2",
            verdict=2, plan=plan.to_data(), predicted_us=2_310_000, baseline_us=None, gain_percent=None, cost_us=180_000,
            payback_iterations=None, at_iteration=80, change="micro-batches of replica 1 pass through replica 0 for layers 8–11",
        )
    )  # fmt: skip
    writer.apply(plan, "p2", "rank 6 is dead")
    writer.train(40)
    writer.control(RunFinished(status="done", iterations=writer.iteration))
    return writer


def repartitioned(epoch: int) -> Plan:
    """Fewer layers and fewer micro-batches for rank 3."""
    return plan_from_partition(
        epoch=epoch, n_layers=16, schedule="1f1b", members=[range(4), range(4, 8)], layers=[(5, 5, 4, 2), (4, 4, 4, 4)],
        micro_batches=(7, 9),
    )  # fmt: skip


def proposal(plan: Plan) -> PlanProposed:
    return PlanProposed(
        proposal="p1", epoch=plan.epoch, digest=plan.digest, optional=True, reason="Rank 3 is slow: give it fewer layers.", verdict=1,
        plan=plan.to_data(), predicted_us=1_790_000, baseline_us=2_270_000, gain_percent=21.1, cost_us=640_000,
        payback_iterations=2, at_iteration=34, change="rank 3: 4 → 2 layers; replica 0: 8 → 7 micro-batches",
    )  # fmt: skip


def _slow_verdict() -> Verdict:
    return Verdict(
        verdict=1, cause="slow_device", culprits=(Party(kind="device", rank=3),), since_iteration=30, at_iteration=33,
        victims=tuple(Party(kind="device", rank=rank) for rank in (0, 1, 2)), speed={"F": 0.55, "B": 0.55}, confidence=0.99,
        evidence={"ratio": 1.81, "peers": 1.0}, sentence="Rank 3 runs at 0.55 of its healthy speed since iteration 30.",
    )  # fmt: skip


def _score(epoch: int, name: str, iteration: int) -> PlanScored:
    return PlanScored(
        epoch=epoch, proposal=name, from_iteration=iteration - 14, to_iteration=iteration - 1, n=14, predicted_s=1.79,
        baseline_s=2.27, measured_s=1.81, effect_s=0.46, interval_s=(0.43, 0.49),
    )  # fmt: skip


def _plain(model: object) -> dict[str, object]:
    data: dict[str, object] = msgspec.to_builtins(model)
    return data
