"""What a plan was worth on the very batches that ran, and verdicts against injected truth."""

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import CommittedIteration
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.loop.scoring import PlanTrial, score_plan, score_verdict
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.scheduler.cost_benefit import interval
from unskew.collector.events import FaultInjected, Party, Verdict

COST = CostModel(
    chunks={kind: ChunkCost(layer_us=400.0, token_us=8.2 * k, token2_us=0.006 * k) for kind, k in (("F", 1), ("B", 2))}
)
SPEEDS = {1: {"F": 0.5, "B": 0.5}}
OLD = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8)
NEW = plan_from_partition(
    plan_version=1, n_layers=8, schedule="1f1b", members=[(0, 1), (2, 3)], layers=[(5, 3), (4, 4)], micro_batches=[3, 5]
)


def trial(n: int, *, old=OLD, noise: float = 0.01, seed: int = 0, from_iteration: int = 40) -> tuple[PlanTrial, list[float]]:
    """`n` iterations under NEW, the first of which also pays 2 s for the change; and the true effect of each but that (s)."""
    random = np.random.default_rng(seed)
    grown = PlanTrial(plan=NEW, old=old, proposal="p1", from_iteration=from_iteration)
    truth = []
    for i in range(n):
        works = tuple(work_of([int(x) for x in random.integers(20, 200, 4)]) for _ in NEW.routes)
        new_us = predict_iteration(NEW, works, COST, SPEEDS).iteration_us
        measured_us = new_us * (1 + random.normal(0, noise)) + (2e6 if i == 0 else 0)
        one = CommittedIteration(
            iteration=from_iteration + i, plan_version=1, chunks=(), works=works, measured_us=measured_us, log_complete=True
        )
        grown = grown.add(one, COST, SPEEDS, new_us)
        if i:
            truth.append((predict_iteration(OLD, works, COST, SPEEDS).iteration_us - new_us) / 1e6)
    return grown, truth


def test_the_effect_is_measured_on_the_very_batches_and_without_the_cost_of_changing() -> None:
    grown, truth = trial(25)
    scored = score_plan(grown)
    assert (scored.n, scored.from_iteration, scored.to_iteration, scored.void) == (24, 41, 64, None)
    assert scored.effect_s == pytest.approx(np.mean(truth), rel=0.05)
    assert scored.predicted_s == pytest.approx(scored.measured_s, rel=0.02)
    assert scored.interval_s is not None
    assert scored.interval_s[0] < np.mean(truth) < scored.interval_s[1]
    assert scored.baseline_s - scored.measured_s == pytest.approx(scored.effect_s)


def test_a_predictor_that_is_wrong_about_the_plan_in_force_widens_the_interval() -> None:
    """The machine is half again as fast as believed, under either plan: two thirds of the effect that is stated are there."""
    grown, truth = trial(25)
    rows = tuple(msgspec.structs.replace(row, measured_us=row.measured_us / 1.5) for row in grown.rows)
    scored = score_plan(msgspec.structs.replace(grown, rows=rows))
    assert scored.effect_s > 2 * np.mean(truth) / 1.5
    assert scored.interval_s[0] < np.mean(truth) / 1.5 < scored.effect_s <= scored.interval_s[1]


def test_an_iteration_of_another_epoch_does_not_count() -> None:
    grown, _ = trial(5)
    other = CommittedIteration(iteration=60, plan_version=2, chunks=(), works=(), measured_us=1.0, log_complete=True)
    assert grown.add(other, COST, SPEEDS, 1.0) == grown


@pytest.mark.parametrize(
    ("n", "ended", "at", "void"),
    [
        (11, "", None, None),
        (10, "", None, "only 9 iterations"),
        (30, "rank 1 recovered", 50, "rank 1 recovered"),
        (30, "rank 1 recovered", 51, None),
        (6, "plan 2 came", None, "plan 2 came"),
    ],
)
def test_void_when_the_comparison_ended_before_ten_iterations(n: int, ended: str, at: int | None, void: str | None) -> None:
    scored = score_plan(trial(n)[0], ended, at)
    if void is None:
        assert scored.void is None
        assert scored.n == (10 if at else n - 1)
        assert scored.effect_s is not None
    else:
        assert void in (scored.void or "")
        assert scored.effect_s is scored.interval_s is scored.measured_s is None


def test_after_a_death_there_is_a_prediction_to_check_but_no_effect() -> None:
    scored = score_plan(trial(15, old=None)[0])
    assert scored.predicted_s == pytest.approx(scored.measured_s, rel=0.02)
    assert scored.effect_s is scored.baseline_s is None
    assert "nothing to compare with" in (scored.void or "")


@pytest.mark.parametrize(("n", "correlation", "least"), [(10, 0.0, 0.92), (10, 0.3, 0.92), (10, 0.6, 0.86)])
def test_the_interval_covers_the_truth_also_when_neighbours_are_alike(n: int, correlation: float, least: float) -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        values = [random.normal()]
        for _ in range(n - 1):
            values.append(correlation * values[-1] + random.normal() * np.sqrt(1 - correlation**2))
        low, high = interval(values)
        covered += low < 0 < high
    assert covered >= least * 1000


def slow(rank=3, at=30, until=None, factor=1.8, phase=None) -> FaultInjected:
    return FaultInjected(kind="slow", rank=rank, at_iteration=at, until_iteration=until, factor=factor, phase=phase)


def verdict(cause="slow_device", rank=3, since=31, at=34, *, speed=None, how=None) -> Verdict:
    return Verdict(
        verdict=1, cause=cause, culprits=(Party(kind="device", rank=rank),), speed=speed or {}, since_iteration=since,
        at_iteration=at, confidence=1.0, sentence="", evidence={"how": how} if how else {},
    )  # fmt: skip


BOTH = {"F": 0.5, "B": 0.6}
FREEZE = FaultInjected(kind="freeze", rank=2, at_iteration=50)
KILL = FaultInjected(kind="kill", rank=6, at_iteration=70)
SCORED = {
    "right rank": (verdict(speed=BOTH), [slow(), KILL], (4, 1, pytest.approx(1 / 1.8 - 0.5))),
    "wrong rank": (verdict(rank=2), [slow()], None),
    "before the fault": (verdict(since=20, at=24), [slow()], None),
    "after its end": (verdict(since=60, at=64), [slow(until=60)], None),
    "named after its end": (verdict(since=57, at=61, speed=BOTH), [slow(until=60)], (31, 27, pytest.approx(0.0556, abs=1e-3))),
    "the later of two": (verdict(since=60, at=64, speed=BOTH), [slow(), slow(at=60, factor=2)], (4, 0, pytest.approx(0.1))),
    "one kind, both accused": (verdict(speed={"F": 0.5, "B": 0.7}), [slow(factor=2, phase="F")], (4, 1, pytest.approx(0.3))),
    "one kind, missed": (verdict(speed={"B": 0.9}), [slow(factor=2, phase="F")], (4, 1, pytest.approx(0.5))),
    "killed": (verdict("dead", 6, 70, 70, how="exit"), [slow(), KILL], (0, 0, None)),
    "killed, called slow": (verdict("slow_device", 6, 70, 74), [KILL], None),
    "frozen": (verdict("hung", 2, 50, 50, how="frozen"), [FREEZE], (0, 0, None)),
    "no fault at all": (verdict(), [], None),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORED)
def test_a_verdict_is_scored_against_injected_truth(name: str) -> None:
    decided, faults, expected = SCORED[name]
    scored = score_verdict(decided, faults, truth_known=True)
    assert scored is not None
    assert scored.correct == (expected is not None) == (scored.truth is not None)
    assert (scored.delay_iterations, scored.onset_error_iterations, scored.speed_error) == (expected or (None, None, None))


UNMATCHED = {
    "dead of itself": (verdict("dead", 6, 70, 70, how="exit"), [slow()], True),
    "frozen by somebody": (verdict("hung", 2, 50, 50, how="frozen"), [], True),
    "slow on a real device": (verdict(), [KILL], False),
}


@pytest.mark.parametrize("name", UNMATCHED)
def test_what_nobody_injected_is_not_called_wrong_where_it_may_be_true(name: str) -> None:
    decided, faults, truth_known = UNMATCHED[name]
    assert score_verdict(decided, faults, truth_known=truth_known) is None
