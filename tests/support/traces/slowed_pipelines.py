"""Pipelines of other systems in which some ranks are slow: everything about them drawn from a seed, no lengths recorded."""

from __future__ import annotations

import msgspec
import numpy as np
from support.traces.foreign_traces import log_of, spans_of

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.diagnose import Diagnosis
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.pipeline.actions import Action


class SlowRank(msgspec.Struct, frozen=True):
    """`factor` times as long in the kinds of work `kinds` and the iterations [begin, end)."""

    rank: int
    factor: float
    kinds: str
    begin: int
    end: int


class SlowedPipeline(msgspec.Struct, frozen=True):
    """`stage_cost` [stage]: of the stage beside a usual one; `curvature` [stage]: how much faster than its documents' length a
    micro-batch's time grows there. `spread` of lengths and `noise` of chunks, logs."""

    plan: Plan
    iterations: int
    slow: tuple[SlowRank, ...]
    stage_cost: tuple[float, ...]
    curvature: tuple[float, ...]
    spread: float
    noise: float
    seed: int

    @property
    def stages(self) -> int:
        return len(self.stage_cost)

    @property
    def replicas(self) -> int:
        return len(self.plan.ranks) // self.stages

    def log(self) -> RunLog:
        """As it is imported."""
        random = np.random.default_rng(self.seed)
        length = np.exp(random.normal(0, self.spread, (self.iterations, len(self.plan.routes))))
        stage_of = {role.rank: role.stage for role in self.plan.roles}

        def factor(iteration: int, action: Action) -> float:
            stage = stage_of[action.rank]
            of = float(length[iteration, action.micro_batch])
            times = self.stage_cost[stage] * (of + self.curvature[stage] * of**2) / (1 + self.curvature[stage])
            for one in self.slow:
                if one.rank == action.rank and action.kind in one.kinds and one.begin <= iteration < one.end:
                    times *= one.factor
            return times

        spans = spans_of(self.plan, iterations=self.iterations, factor=factor, spread=0.0, noise=self.noise, seed=self.seed)
        return log_of(spans)


def slowed_pipeline(seed: int, n_slow: int | None = None) -> SlowedPipeline:
    """One of many. `n_slow`: how many ranks are slow (0 to 2 where it is left open)."""
    random = np.random.default_rng(seed)
    pp, dp, iterations = int(random.choice([2, 3, 4, 6, 8])), int(random.integers(1, 5)), int(random.integers(24, 61))
    plan = uniform_plan(tp=1, pp=pp, dp=dp, n_layers=pp, micro_batches=dp * max(pp, int(random.integers(4, 9))))
    cost = np.ones(pp)
    cost[0], cost[-1] = random.uniform(1.0, 1.4, 2)
    slow = []
    for rank in random.choice(list(plan.ranks), int(random.integers(0, 3)) if n_slow is None else n_slow, replace=False):
        begin, end = 0, iterations
        if random.random() < 0.5:
            begin = int(random.integers(6, iterations - 8))
        if random.random() < 0.3:
            end = int(random.integers(begin + 8, iterations + 1))
        slow.append(
            SlowRank(int(rank), float(random.uniform(1.1, 2.0)), str(random.choice(["F", "B", "FB", "FB"])), begin, end)
        )
    return SlowedPipeline(
        plan=plan,
        iterations=iterations,
        slow=tuple(slow),
        stage_cost=tuple(cost.tolist()),
        curvature=tuple(random.uniform(0, 0.5, pp).tolist()),
        spread=float(random.choice([0.02, 0.1, 0.2, 0.4])),
        noise=float(random.choice([0.005, 0.01, 0.03])),
        seed=seed,
    )


class PipelineScore(msgspec.Struct, frozen=True):
    """What a diagnosis makes of a pipeline: slow ranks `named` and `missed`, healthy ones that are `accused`; `falsely_calm`:
    called well above what it says it would have named."""

    named: tuple[int, ...]
    missed: tuple[int, ...]
    accused: tuple[int, ...]
    falsely_calm: bool
    abstained: bool


def scored(pipeline: SlowedPipeline, found: Diagnosis) -> PipelineScore:
    slow = {one.rank for one in pipeline.slow}
    culprits = {
        party.rank for one in found.verdicts if one.cause == "slow_device" for party in one.culprits if party.rank is not None
    }
    lasting = [one.factor for one in pipeline.slow if one.end == pipeline.iterations and one.kinds == "FB"]
    return PipelineScore(
        named=tuple(sorted(slow & culprits)),
        missed=tuple(sorted(slow - culprits)),
        accused=tuple(sorted(culprits - slow)),
        falsely_calm=found.outcome == "well" and max(lasting, default=0.0) >= (found.smallest_slowdown or 0.0),
        abstained=found.outcome == "cannot_be_judged",
    )
