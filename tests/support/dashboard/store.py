"""A store with runs as a real one leaves them, written through the collector's own writers: what the dashboard's tests look at.

Times come from the pipeline model with a little seeded noise, so that the page's figures hang together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.collector.events import (
    Control,
    DetectionLimit,
    DeviceJoined,
    IterationCommitted,
    IterationJudged,
    MicroBatchPacked,
    Mode,
    PlanApplied,
    PredictorFitted,
    RankRatio,
    Regrouped,
    RunStarted,
    Span,
)
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

COST = profile("steady")
FIRST = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
WARM_UP = 6


class RunWriter:
    """Writes one run iteration by iteration; `speeds` is the truth, `estimated_speeds` what the detector knows."""

    def __init__(self, store: Store, run: str, *, mode: Mode = "auto", iterations: int = 180, incarnation: int = 1) -> None:
        self.random = random.Random(run)
        self.run, self.iteration, self.clock_us = run, 0, 0
        self.plan = FIRST
        self.speeds: dict[int, dict[str, float]] = {}
        self.estimated_speeds: dict[int, dict[str, float]] = {}
        self.shortest = 440
        """Tokens of a micro-batch at least."""
        self.stream = ControlStream(store, run, "control", f"controller.{incarnation}")
        self.telemetry = SpoolWriter(store, run, f"rank-0000.{incarnation}")
        self.control(
            RunStarted(
                run=run,
                device="sleep",
                clock="monotonic",
                mode=mode,
                ranks=8,
                options={"iterations": iterations, "pp": 4, "dp": 2},
                code="0f3a",
                version="0.1.0",
            ),
            *(DeviceJoined(device=f"device-{rank}", rank=rank, node="local", pid=1000 + rank) for rank in range(8)),
            self._applied(self.plan, "", "the plan the run starts with"),
        )

    def control(self, *events: Control, actor: str = "controller") -> None:
        self.stream.append(self.stream.version, events, actor=actor)

    def apply(self, plan: Plan, proposal: str, reason: str) -> None:
        self.plan = plan
        self.control(
            self._applied(plan, proposal, reason),
            Regrouped(
                plan_version=plan.plan_version,
                iteration=self.iteration,
                seconds=0.18,
                migrate_seconds=0.05,
                moved_bytes=2_400_000,
            ),
        )

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
        predicted_us = int(predict_iteration(self.plan, works, COST, self.estimated_speeds).iteration_us + 14_000)
        fitted = self.iteration >= WARM_UP
        if self.iteration == WARM_UP:
            self.control(
                PredictorFitted(
                    predictor=1,
                    watermark=self.iteration - 1,
                    model=msgspec.to_builtins(COST),
                    n_chunks=768,
                    error_percent={"F": 1.3, "B": 1.1},
                    trigger="warm-up",
                ),
                DetectionLimit(at_iteration=self.iteration, smallest_slowdown=1.15),
            )
        for number, documents in enumerate(lengths):
            self.telemetry.append(
                MicroBatchPacked(iteration=self.iteration, micro_batch=number, attempt=0, lengths=tuple(documents))
            )
        self._spans(works)
        for rank in self.plan.ranks:
            self.telemetry.append(
                IterationCommitted(
                    iteration=self.iteration,
                    plan_version=self.plan.plan_version,
                    attempt=0,
                    rank=rank,
                    loss=self._loss(),
                    log_complete=True,
                    tokens=sum(work.tokens for work in works),
                    start_us=self.clock_us,
                    wall_us=measured_us,
                )
            )
        judged = IterationJudged(
            iteration=self.iteration,
            plan_version=self.plan.plan_version,
            measured_us=measured_us,
            predicted_us=predicted_us if fitted else None,
            ranks=self._ratios(works) if fitted else (),
        )
        self.telemetry.append(judged)
        self.iteration += 1
        self.clock_us += measured_us

    def _lengths(self) -> list[int]:
        lengths: list[int] = []
        while sum(lengths) < self.shortest:
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
                    rank=rank,
                    f=off["F"],
                    b=off["B"],
                    score=max(off.values()) - 1,
                    healthy_us=int(sum(predicted.values())),
                    measured_us=int(sum(predicted[kind] * off[kind] for kind in predicted)),
                )
            )
        return tuple(ratios)

    def _spans(self, works: Sequence[Work]) -> None:
        timeline = predict_iteration(self.plan, works, COST, self.speeds).timeline
        for action, start, end in zip(timeline.schedule.order, timeline.start_us, timeline.end_us, strict=True):
            self.telemetry.append(
                Span(
                    kind=action.kind,
                    device=f"device-{action.rank}",
                    rank=action.rank,
                    plan_version=self.plan.plan_version,
                    attempt=0,
                    iteration=self.iteration,
                    micro_batch=action.micro_batch,
                    first_layer=action.first_layer,
                    n_layers=action.n_layers,
                    start_us=self.clock_us + int(start),
                    wall_us=int((end - start) * 1.01),
                    compute_us=int(end - start),
                )
            )

    def _applied(self, plan: Plan, proposal: str, reason: str) -> PlanApplied:
        return PlanApplied(
            plan_version=plan.plan_version,
            digest=plan.digest,
            proposal=proposal,
            iteration=self.iteration,
            reason=reason,
            plan=plan.to_data(),
        )
