"""A whole replica slower than the others is no long sequence, and no proof of bad hardware: the replica or its data."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from support.datasets import dataset
from support.traces.foreign_traces import log_of, spans_of

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose
from unskew.analytics.diagnosis.ranks.replicas import excess_of, judge_replicas
from unskew.analytics.diagnosis.trace.model import from_operations
from unskew.analytics.diagnosis.trace.section import record, without_lengths
from unskew.analytics.pipeline.actions import Action
from unskew.collector.events import Verdict

SLOW, ITERATIONS = 1, 40


def diagnosed(
    *, stages: int, replicas: int, batches: int, spread: float, seed: int, slow: float = 1.0, during: range = range(ITERATIONS)
) -> Diagnosis:
    """Replica `SLOW` takes `slow` times as long in the iterations of `during`, for its hardware or its documents alike."""
    plan = uniform_plan(tp=1, pp=stages, dp=replicas, n_layers=4, micro_batches=replicas * batches)
    ranks = {role.rank for role in plan.roles if role.replica == SLOW}
    spans = spans_of(
        plan, iterations=ITERATIONS, spread=spread, seed=seed,
        factor=lambda i, chunk: slow if chunk.rank in ranks and i in during else 1.0,
    )  # fmt: skip
    return diagnose(log_of(spans))


def about_replicas(found: Diagnosis) -> list[Verdict]:
    return [verdict for verdict in found.verdicts if verdict.culprits and verdict.culprits[0].kind == "replica"]


SHAPES = [
    {"stages": 2, "replicas": 2, "batches": 4, "spread": 0.2},
    {"stages": 2, "replicas": 4, "batches": 2, "spread": 0.1},
    {"stages": 4, "replicas": 2, "batches": 8, "spread": 0.3},
    {"stages": 2, "replicas": 3, "batches": 1, "spread": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("during", [range(ITERATIONS), range(15, ITERATIONS), range(10, 28)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shift_of_a_replica_is_named_with_doubt(shape: dict[str, int], during: range) -> None:
    found = diagnosed(**shape, seed=during.start + shape["stages"], slow=1.5, during=during)
    assert not [verdict for verdict in found.verdicts if verdict.cause == "slow_device"]
    (verdict,) = about_replicas(found)
    assert verdict.culprits[0].replica == SLOW
    assert "replica 1 (ranks" in verdict.sentence
    assert "or its data" in verdict.sentence
    assert verdict.sentence.endswith(f"since iteration {verdict.since_iteration}"), "an end is said behind it"
    assert verdict.confidence <= 0.5
    assert "document lengths" in verdict.evidence["next_step"]
    assert abs(verdict.since_iteration - during.start) <= 2
    end = ITERATIONS if verdict.until_iteration is None else verdict.until_iteration
    assert abs(end - during.stop) <= 2
    assert verdict.speed["B"] == pytest.approx(1 / 1.5, abs=0.08)
    lost = found.time_lost_s
    assert lost["unknown"] > 0.6 * (sum(lost.values()) - lost.get("long_sequences", 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_drawn_anew_in_each_iteration_name_no_replica(shape: dict[str, int], seed: int) -> None:
    found = diagnosed(**{**shape, "spread": 0.5}, seed=100 + seed)
    assert about_replicas(found) == []
    (lengths,) = [verdict for verdict in found.verdicts if verdict.cause == "long_sequences"]
    assert "a replica slower by" in lengths.sentence


def test_a_slow_replica_is_no_victim_of_another() -> None:
    """Of two that turned slow, each verdict said that the other only waited."""
    plan = uniform_plan(tp=1, pp=2, dp=5, n_layers=4, micro_batches=10)
    since = {role.rank: {1: 15, 2: 25}.get(role.replica, ITERATIONS) for role in plan.roles}
    spans = spans_of(plan, iterations=ITERATIONS, spread=0.1, factor=lambda i, chunk: 1.5 if i >= since[chunk.rank] else 1.0)
    of_replicas = about_replicas(diagnose(log_of(spans)))
    assert [one.culprits[0].replica for one in of_replicas] == [1, 2]
    assert [[party.replica for party in one.victims] for one in of_replicas] == [[0, 3, 4]] * 2


def test_one_slow_device_is_not_taken_for_its_replica() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)
    found = diagnose(log_of(spans_of(plan, iterations=ITERATIONS, factor=lambda _i, chunk: 1.6 if chunk.rank == 3 else 1.0)))
    assert about_replicas(found) == []


@pytest.mark.parametrize("seed", [14, 35])
def test_a_replica_is_not_measured_by_the_only_other_one_whose_device_is_slow(seed: int) -> None:
    """How long its passes would take without the fault is not known well enough to accuse the healthy rank by it."""
    plan = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=2)
    random, drawn = np.random.default_rng(seed), dict[tuple[int, int, str], float]()

    def factor(iteration: int, chunk: Action) -> float:
        slow = chunk.rank == 1 and chunk.kind == "F"
        times = 20 * random.lognormal(0, 0.6) if slow else random.lognormal(0, 0.25) * (1.15 if chunk.rank == 0 else 1.0)
        return drawn.setdefault((iteration, chunk.rank, chunk.kind), times)

    found = diagnose(log_of(spans_of(plan, iterations=14, factor=factor)))
    assert [[party.rank for party in one.culprits] for one in found.verdicts] == [[1]]


@pytest.mark.parametrize("name", ["ops-ST.parquet", "ops-SE-windows12.parquet"])
def test_published_traces_name_no_replica_and_a_replica_slowed_in_them_is_named(name: str) -> None:
    section = without_lengths(record(from_operations(pl.read_parquet(dataset("bytedance-straggler", name)))))
    options, work = DetectorOptions(), section.parts.work_us
    excess = excess_of(section, work, (), options)
    assert excess is not None
    assert judge_replicas(section, excess, options, 1) == ()
    mine = np.array([o.replica == SLOW and o.micro_batch is not None for o in section.recording.graph.operations])
    slowed = excess_of(section, np.where(mine[:, None], 1.4 * work, work), (), options)
    assert slowed is not None
    (verdict,) = judge_replicas(section, slowed, options, 1)
    assert verdict.culprits[0].replica == SLOW
    assert verdict.until_iteration is None


@pytest.mark.parametrize(
    ("every", "words"), [(3, "of it where replica 1 (ranks 2, 3) has the most"), (39, "cannot be told from a device")]
)
def test_a_replica_slow_now_and_then_is_no_proof_that_devices_are_well(every: int, words: str) -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)
    ranks = {role.rank for role in plan.roles if role.replica == SLOW}
    factor = 2.0 if every < 10 else 8.0
    spans = spans_of(
        plan, iterations=ITERATIONS, spread=0.02,
        factor=lambda i, chunk: factor if chunk.rank in ranks and i % every == every - 1 else 1.0,
    )  # fmt: skip
    (lengths,) = [verdict for verdict in diagnose(log_of(spans)).verdicts if verdict.cause == "long_sequences"]
    assert words in lengths.sentence
    assert "long sequences, as" not in lengths.sentence
