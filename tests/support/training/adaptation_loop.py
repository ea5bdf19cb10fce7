"""An adaptation that goes on, what it is given changes it; and iterations of made-up ranks for it, of one pipeline twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import numpy as np

from unskew.analytics.core.cost import Speeds, speed_of
from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry, Transfer
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.loop.adaptation import Adaptation, AdaptationStep
from unskew.analytics.loop.site import Site
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.predictor.fit import Fit
from unskew.collector.events import Regrouped

COST = profile("steady")
PLAN = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16)
SITE = Site(origin=PLAN, iterations=400, layer_bytes=(100_000,) * 16, bytes_per_us=200.0, regroup_us=300_000.0)
Truth = Callable[[int], Speeds]
Telemetry = Iterator[IterationTelemetry]
E = TypeVar("E")


class Loop:
    """`now` is the adaptation as it is; all ranks of a plan live."""

    def __init__(self, site: Site) -> None:
        self.now = Adaptation.begin(site)

    @property
    def fitted(self) -> Fit | None:
        return self.now.monitor.fitted

    def observe(self, released: IterationTelemetry, plan: Plan) -> AdaptationStep:
        self.now, step = self.now.observe(released, plan, frozenset(plan.ranks))
        return step


def slow(rank: int, speed: float, at: int) -> Truth:
    return lambda now: {rank: {"F": speed, "B": speed}} if now >= at else {}


def train(
    truth: Truth, n: int, *, plan: Plan = PLAN, first: int = 0, incomplete: Collection[int] = (), disturbed: range = range(0)
) -> Iterator[IterationTelemetry]:
    """Iterations of ranks at the speeds of `truth`; in those `disturbed`, 45 % of the chunks take 1.5 to 4 times as long."""
    random = np.random.default_rng([7, first])
    for now in range(first, first + n):
        works = tuple(work_of([int(x) for x in random.integers(20, 120, 3)]) for _ in plan.routes)
        jobs = [(route.micro_batch, hop, kind) for route in plan.routes for hop in route.hops for kind in "FB"]
        noise = np.exp(random.normal(0, 0.01, len(jobs)))
        if now in disturbed:
            noise *= np.where(random.random(len(jobs)) < 0.45, random.uniform(1.5, 4, len(jobs)), 1.0)
        chunks = []
        for (m, hop, kind), factor in zip(jobs, noise, strict=True):
            has_head = hop.first_layer + hop.n_layers == plan.n_layers
            speed = speed_of(truth(now), hop.ranks[0], kind)
            us = COST.chunk_us(kind, works[m], hop.n_layers, has_head=has_head, speed=speed)
            chunks.append(Chunk(hop.ranks[0], kind, hop.n_layers, has_head, works[m], us * float(factor)))
        complete = now not in incomplete
        yield IterationTelemetry(
            committed=CommittedIteration(
                iteration=now, plan_version=plan.plan_version, chunks=tuple(chunks) if complete else (), works=works,
                measured_us=predict_iteration(plan, works, COST, truth(now)).iteration_us + 20_000, log_complete=complete,
                transfers=(Transfer(0, 1, 100.0),),
            ),
        )  # fmt: skip


def follow(loop: Loop, iterations: Iterator[IterationTelemetry], plan: Plan = PLAN) -> dict[int, AdaptationStep]:
    return {released.committed.iteration: loop.observe(released, plan) for released in iterations}


def events(steps: Mapping[int, AdaptationStep], kind: type[E]) -> list[E]:
    return [event for step in steps.values() for event in step.events if isinstance(event, kind)]


def healthy(_now: int) -> Speeds:
    return {}


def in_trial(loop: Loop, truth: Truth, changed: Callable[[Telemetry], Telemetry] = lambda same: same) -> Plan:
    """The loop after rank 3 was named, with the plan that it then proposed just applied."""
    steps = follow(loop, changed(train(truth, 40)))
    (proposal,) = [step.proposal for step in steps.values() if step.proposal]
    plan = proposal.plan.renumbered(1)
    regrouped = Regrouped(plan_version=1, iteration=40, seconds=0.3, migrate_seconds=0.1, moved_bytes=10**6)
    loop.now, scores = loop.now.applied(plan, "p1", regrouped, before=PLAN, old=PLAN)
    assert scores == []
    return plan
