"""Pipelines without lengths in which ranks are slow from the first recorded step or later: the right ones, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import msgspec
import numpy as np
import pytest
from support.traces.foreign_traces import REDUCE_US, log_of, spans_of
from support.traces.slowed_pipelines import PipelineScore, scored, slowed_pipeline

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose, sections_of
from unskew.analytics.diagnosis.slowness.places import Rows, SlowPlace
from unskew.analytics.diagnosis.slowness.search import slowness_of
from unskew.analytics.diagnosis.trace.lost import time_lost

FIRST_SEEDS = range(5_000, 5_030, 6)  # none of those that it was made on
ITERATIONS = 40


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_slow_ranks_are_named_and_no_other_is(first: int) -> None:
    """Every shape and every fault drawn anew; with one replica only what changes can be known."""
    of: dict[int, list[PipelineScore]] = {}
    for seed in range(first, first + FIRST_SEEDS.step):
        pipeline = slowed_pipeline(seed)
        of.setdefault(pipeline.replicas, []).append(scored(pipeline, diagnose(pipeline.log())))
    every = [one for many in of.values() for one in many]
    assert [one.accused for one in every if one.accused] == []
    assert not any(one.falsely_calm for one in every)
    several = [one for replicas, many in of.items() if replicas > 1 for one in many]
    named, missed = sum(len(one.named) for one in several), sum(len(one.missed) for one in several)
    assert named >= 0.9 * (named + missed) > 1


def diagnosed(stages: int, replicas: int, factors: dict[int, float], *, kinds: str = "FB", spread: float = 0.1) -> Diagnosis:
    """Ranks (replica x stages + stage) take so many times as long, from the first recorded step to the last."""
    plan = uniform_plan(tp=1, pp=stages, dp=replicas, n_layers=stages, micro_batches=8 * replicas)
    return diagnose(
        log_of(
            spans_of(
                plan,
                iterations=ITERATIONS,
                spread=spread,
                factor=lambda _i, chunk: factors.get(chunk.rank, 1.0) if chunk.kind in kinds else 1.0,
            )
        )
    )


def accused(found: Diagnosis) -> dict[int | None, dict[str, float]]:
    return {one.culprits[0].rank: one.speed for one in found.verdicts if one.cause == "slow_device"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "replicas", "factors"),
    [(2, 2, {3: 1.5}), (3, 2, {1: 1.1}), (4, 2, {4: 1.3, 6: 1.6}), (2, 4, {2: 1.2, 4: 1.3}), (8, 3, {0: 1.15, 7: 1.15})],
)
def test_each_is_named_with_its_own_speed_from_the_first_step_on(stages: int, replicas: int, factors: dict[int, float]) -> None:
    found = diagnosed(stages, replicas, factors)
    assert accused(found).keys() == factors.keys()
    for rank, factor in factors.items():
        assert accused(found)[rank] == {kind: pytest.approx(1 / factor, abs=0.03) for kind in "BF"}
    assert {one.since_iteration for one in found.verdicts} == {0}
    assert {one.until_iteration for one in found.verdicts} == {None}


def test_what_a_rank_slow_from_the_first_step_on_costs_in_it_has_its_cause() -> None:
    """In the first recorded step as in every later one, whatever its number is; none of it is unexplained."""
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=2, micro_batches=16)
    spans = spans_of(plan, iterations=ITERATIONS, spread=0.1, factor=lambda _i, chunk: 1.5 if chunk.rank == 3 else 1.0)
    log = log_of([msgspec.structs.replace(span, iteration=100 + 10 * (span.iteration or 0)) for span in spans])
    (section,), findings, _ = sections_of(log)
    (verdict,) = findings.verdicts
    assert (verdict.culprits[0].rank, verdict.since_iteration) == (3, 100)
    lost = time_lost(section, findings.verdicts)
    cost = lost.causes["slow_device"] / lost.measured_us
    assert cost[0] == pytest.approx(np.median(cost), rel=0.2)
    assert np.median(cost) > 0.2
    assert lost.parts["unexplained"][0] < 0.1 * lost.causes["slow_device"][0]


def test_a_rank_slow_in_one_kind_of_work_is_named_for_that_kind() -> None:
    assert accused(diagnosed(3, 2, {4: 1.4}, kinds="B")) == {4: {"B": pytest.approx(1 / 1.4, abs=0.03)}}


@pytest.mark.parametrize("factors", [{}, {1: 1.1}])
def test_with_one_replica_a_rank_slow_from_the_first_step_on_looks_like_its_stage(factors: dict[int, float]) -> None:
    """Little enough to cost no 5 % of the time, so nothing is named; and calm it is not."""
    found = diagnosed(4, 1, factors, spread=0.01)
    assert (found.outcome, found.smallest_slowdown) == ("cannot_be_judged", None)
    assert "looks like a costly stage" in found.why


def test_with_one_replica_what_costs_much_is_the_stage_or_its_device() -> None:
    found = diagnosed(4, 1, {1: 1.5}, spread=0.01)
    (stage,) = found.verdicts
    assert stage.cause == "stage_imbalance"
    assert "its layers or its device" in stage.sentence


@pytest.mark.parametrize(
    ("noise", "replicas", "stated", "missing"),
    [
        (0.3, 1, "one that turned slow later by", "cannot be told from its data"),
        (0.8, 1, "looks like a costly stage", "turned slow later"),
        (0.3, 2, "of a whole replica by", "cannot be told from its data"),
        (2.5, 2, "a whole replica that is slow cannot be told from its data", "of a whole replica by"),
    ],
)
def test_what_no_factor_of_two_or_ten_would_show_is_not_stated(noise: float, replicas: int, stated: str, missing: str) -> None:
    """ "By 12,300 % or more" is no statement."""
    plan = uniform_plan(tp=1, pp=2, dp=replicas, n_layers=2, micro_batches=4)
    found = diagnose(log_of(spans_of(plan, iterations=20, spread=0.02, noise=noise)))
    assert (stated in found.why, missing in found.why) == (True, False), found.why


def test_where_two_ranks_explain_it_alike_neither_is_accused() -> None:
    """Two stages, two replicas, lengths that vary by more than the rank is slow: rank 3, or rank 0 and shorter documents."""
    found = diagnosed(2, 2, {3: 1.2}, spread=1.5)
    assert accused(found) == {}
    assert found.outcome != "well"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5_000, 5_010))
def test_healthy_pipelines_accuse_nobody(seed: int) -> None:
    pipeline = slowed_pipeline(seed, n_slow=0)
    assert accused(diagnose(pipeline.log())) == {}


def without_messages(
    iterations: int, *, replicas: int = 2, reduce_us: Callable[[int], float] = lambda _iteration: REDUCE_US
) -> Diagnosis:
    """A healthy pipeline that cannot be replayed: several stages, and nothing that shows who waits for whom."""
    plan = uniform_plan(tp=1, pp=2, dp=replicas, n_layers=2, micro_batches=8 * replicas)
    spans = spans_of(plan, iterations=iterations, spread=0.02, reduce_us=reduce_us)
    return diagnose(log_of([span for span in spans if span.kind not in {"send", "recv"}]))


def test_without_a_replay_the_whole_job_is_judged_before_it_is_well() -> None:
    found = without_messages(40)
    assert (found.outcome, found.time_lost_s) == ("well", {})
    assert "cannot be replayed; by iteration times a lasting slowdown of the whole job" in found.why
    short = without_messages(8)
    assert short.outcome == "cannot_be_judged"
    assert "cannot be replayed" in short.why
    random = np.random.default_rng(0)
    noisy = without_messages(40, reduce_us=lambda _iteration: 1e6 * float(random.lognormal(0, 3)))
    assert "cannot be replayed, and times vary so much by themselves that no lasting slowdown of the whole job" in noisy.why


def test_without_a_replay_a_rank_that_shares_its_work_with_no_other_cannot_be_judged() -> None:
    found = without_messages(40, replicas=1)
    assert (found.outcome, found.verdicts) == ("cannot_be_judged", ())
    assert "shares its work with no other" in found.why


def test_the_smallest_slowdown_that_is_stated_would_have_been_named() -> None:
    """And is no larger than it has to be."""
    named, below, seeds = 0, 0, range(10)
    for (stages, replicas, n), seed in product([(4, 2, 40), (2, 4, 30)], seeds):
        random = np.random.default_rng([seed, stages])
        rows = Rows(kind=(0,) * stages + (1,) * stages, stage=tuple(range(stages)) * 2)
        logs = random.normal(0, 0.2, (1, replicas, n)) + random.normal(0, 0.01, (2 * stages, replicas, n))
        stated = slowness_of(logs, rows, DetectorOptions()).smallest
        assert stated is not None
        who = SlowPlace((seed % stages,), (seed % replicas,))
        mine = np.zeros((2 * stages, replicas, 1))
        mine[seed % stages :: stages, seed % replicas] = 1.0
        for part in (1.0, 0.7):
            found = [one.who for one in slowness_of(logs + part * stated * mine, rows, DetectorOptions()).named]
            assert [one for one in found if one.is_rank and one != who] == []
            named += part == 1.0 and who in found
            below += part < 1.0 and who in found
    assert named >= 0.95 * 2 * len(seeds) > 2 * below


@pytest.mark.slow
@pytest.mark.limit(30)
def test_of_five_hundred_ranks_the_slow_stage_and_the_slow_rank_are_named() -> None:
    """In minutes where what could explain a stage as well is sought among all sets of its ranks."""
    random = np.random.default_rng(3)
    rows = Rows(kind=(0,) * 8 + (1,) * 8, stage=tuple(range(8)) * 2)
    logs = random.normal(0, 0.2, (1, 64, 24)) + random.normal(0, 0.02, (16, 64, 24))
    logs[[1, 9], :, 5:] += 0.3
    logs[[6, 14], 37, :] += 0.3
    found = slowness_of(logs, rows, DetectorOptions())
    assert {(one.who.stages, len(one.who.replicas), one.begin) for one in found.named} == {((1,), 64, 5), ((6,), 1, 0)}
    assert found.ambiguous == ()
