"""Committed iterations of a pipeline, with the noise measured on sleeping and real devices, and the Detector on them."""

from collections.abc import Callable, Iterator

import numpy as np

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.detector import Detector
from unskew.collector.events import Verdict, VerdictClosed

FORWARD = ChunkCost(layer_us=400.0, token_us=8.2, token2_us=0.006)
COST = CostModel(chunks={"F": FORWARD, "B": ChunkCost(layer_us=800.0, token_us=16.4, token2_us=0.012)})
PP4_DP2 = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=8)
PP2 = uniform_plan(tp=1, pp=2, dp=1, n_layers=8, micro_batches=4)

Factor = Callable[[int, int, str], float]
"""(iteration, rank, kind) -> by how much the chunk takes longer"""


def healthy(_iteration: int, _rank: int, _kind: str) -> float:
    return 1.0


def slow(rank: int, factor: float, at: int, until: int = 10**6, kinds: str = "FB") -> Factor:
    return lambda now, who, kind: factor if who == rank and at <= now < until and kind in kinds else 1.0


def train(
    plan: Plan, factor: Factor, *, seed: int, n: int, first: int = 0, cv: float = 0.03, spikes: float = 0.01
) -> Iterator[CommittedIteration]:
    """Committed iterations of uneven lengths: chunk cv, spikes of 1.5-3.4x, AR(1) drift, 2 % static spread between ranks."""
    random = np.random.default_rng([seed, first])
    bias = np.random.default_rng(seed).normal(0, 0.02, max(plan.ranks) + 1)
    drift = random.normal(0, 0.015, len(bias))
    jobs = [
        (route.micro_batch, hop.rank, hop.n_layers, hop.first_layer + hop.n_layers == plan.n_layers, kind)
        for route in plan.routes
        for hop in route.hops
        for kind in "FB"
    ]
    for iteration in range(first, first + n):
        drift = 0.97 * drift + random.normal(0, 0.015 * np.sqrt(1 - 0.97**2), len(drift))
        works = tuple(work_of([int(x) for x in 1 + random.dirichlet(np.full(6, 0.5)) * 480]) for _ in plan.routes)
        noise = np.exp(random.normal(0, cv, len(jobs)))
        spike = np.where(random.random(len(jobs)) < spikes, random.uniform(1.5, 3.4, len(jobs)), 1.0)
        chunks = tuple(
            Chunk(
                rank, kind, n_layers, has_head, works[m],
                COST.chunk_us(kind, works[m], n_layers, has_head=has_head)
                * float(noise[i] * spike[i] * np.exp(bias[rank] + drift[rank])) * factor(iteration, rank, kind),
            )
            for i, (m, rank, n_layers, has_head, kind) in enumerate(jobs)
        )  # fmt: skip
        yield CommittedIteration(
            iteration=iteration, plan_version=plan.plan_version, chunks=chunks, works=works, measured_us=3e5, log_complete=True
        )


def watch(
    detector: Detector, committed: Iterator[CommittedIteration], plan: Plan, cost: CostModel = COST
) -> list[Verdict | VerdictClosed]:
    return [verdict for one in committed for verdict in detector.observe(one, plan, cost).verdicts]


def run(factor: Factor, *, seed: int = 1, n: int = 60, plan: Plan = PP4_DP2, **noise: float) -> list[Verdict | VerdictClosed]:
    return watch(Detector(), train(plan, factor, seed=seed, n=n, **noise), plan)


def culprit(verdict: Verdict | VerdictClosed) -> int | None:
    assert isinstance(verdict, Verdict)
    return verdict.culprits[0].rank
