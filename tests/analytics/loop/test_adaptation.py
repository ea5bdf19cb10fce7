"""The loop: when it learns, what it keeps, what it says of a trial, and what its proposals are founded on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from support.training.adaptation_loop import (
    COST,
    PLAN,
    SITE,
    Loop,
    Truth,
    events,
    follow,
    healthy,
    in_trial,
    slow,
    train,
)

from unskew.analytics.core.cost import Speeds
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import PlanError
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.options import SHARED_MACHINE
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.pipeline.memory import LayerMemory
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import (
    DetectionLimit,
    Party,
    PlanScored,
    PredictorFitted,
    Verdict,
    VerdictClosed,
    VerdictScored,
)


@pytest.mark.slow
def test_an_incomplete_iteration_is_neither_judged_nor_learned_from_and_only_puts_learning_off() -> None:
    """The first fit is due in iteration 7, the second 40 later; it is tested on the eight after that."""
    fits = [fit.watermark for fit in events(follow(Loop(SITE), train(healthy, 60)), PredictorFitted)]
    assert fits == [7, 55]
    steps = follow(Loop(SITE), train(healthy, 60, incomplete={20, 47}))
    assert [fit.watermark for fit in events(steps, PredictorFitted)] == [7, 56]
    assert [now for now, step in steps.items() if now > 7 and step.judged.predicted_us is None] == [20, 47]
    assert [now for now, step in steps.items() if now > 7 and not step.judged.ranks] == [20, 47]
    assert [now for now, step in steps.items() if not step.judged.log_complete] == [20, 47]


@pytest.mark.parametrize(("at", "named"), [(0, 7), (5, 9)])
def test_a_rank_that_turned_slow_in_the_warm_up_is_dated_there_and_predicted_at_once(at: int, named: int) -> None:
    """The first predictor judges the iterations that it is fitted on, and is fitted again once their speeds are known: it took
    what others waited for the rank for the end of an iteration."""
    steps = follow(Loop(SITE), train(slow(2, 1 / 1.5, at), 30))
    (verdict,) = events(steps, Verdict)
    assert (verdict.culprits[0].rank, verdict.since_iteration) == (2, at)
    assert verdict.at_iteration <= named
    assert verdict.speed["F"] == pytest.approx(1 / 1.5, rel=0.02)
    for now in range(named + 1, 30):
        judged = steps[now].judged
        assert judged.predicted_us == pytest.approx(judged.measured_us, rel=0.02)
    assert next(now for now, step in steps.items() if step.proposal is not None) <= 12


def test_nobody_is_named_for_a_disturbed_warm_up() -> None:
    assert events(follow(Loop(SITE), train(healthy, 40, disturbed=range(8))), Verdict) == []


def test_disturbed_iterations_do_not_replace_a_better_predictor() -> None:
    loop = Loop(SITE)
    follow(loop, train(healthy, 20))
    assert loop.fitted is not None
    good = loop.fitted.model
    steps = follow(loop, train(healthy, 40, first=20, disturbed=range(20, 60)))
    assert events(steps, PredictorFitted) == []
    assert loop.fitted.model == good


def test_drift_of_all_ranks_is_learned_before_its_turn_and_back_tested() -> None:
    """From iteration 30 on everybody is 6 % slower: nobody is accused, and the second predictor, due at 47, comes by 46."""

    def warm(now: int) -> Speeds:
        return {rank: {"F": 1 / 1.06, "B": 1 / 1.06} for rank in PLAN.ranks} if now >= 30 else {}

    loop = Loop(SITE)
    steps = follow(loop, train(warm, 50))
    first, second = events(steps, PredictorFitted)
    assert first.trigger == "warm-up"
    assert second.trigger.startswith("drift of +")
    assert second.watermark <= 46
    assert second.error_percent["chunks, later"] < second.error_percent["chunks, later, before"]
    assert events(steps, Verdict) == []


@pytest.mark.slow
def test_a_run_s_plans_give_no_rank_more_than_its_memory_holds() -> None:
    """The slow rank's layers have no place but where they are; without a limit others take some."""
    layers = {}
    for room_bytes in (None, 450_000.0):
        memory = LayerMemory.of_layers(SITE.layer_bytes)
        loop = Loop(msgspec.structs.replace(SITE, memory=memory, room_bytes=room_bytes))
        steps = follow(loop, train(slow(2, 1 / 1.8, 30), 60))
        proposals = [step.proposal for step in steps.values() if step.proposal is not None]
        assert proposals
        layers[room_bytes] = max(max(sizes) for one in proposals[0].considered for sizes in one.layers)
    assert layers == {None: 5, 450_000.0: 4}


@pytest.mark.slow
def test_a_rank_that_stays_suspected_does_not_keep_the_others_from_being_learned() -> None:
    """Rank 2 is 1.3 times as slow from iteration 30 on, less than is named on cores; everybody is 1.08 times from 36 on."""

    def worn(now: int) -> Speeds:
        of = {rank: (1.3 if rank == 2 and now >= 30 else 1.0) * (1.08 if now >= 36 else 1.0) for rank in PLAN.ranks}
        return {rank: {"F": 1 / factor, "B": 1 / factor} for rank, factor in of.items() if factor > 1}

    loop = Loop(msgspec.structs.replace(SITE, detector=SHARED_MACHINE))
    steps = follow(loop, train(worn, 110))
    assert events(steps, Verdict) == []
    fits = events(steps, PredictorFitted)
    assert fits[1].watermark > 36 + 16, "what may yet be named is waited for"
    assert fits[-1].watermark < 100
    assert fits[-1].error_percent["chunks, later"] < 1.0
    assert loop.fitted is not None
    learned, healthy_us = (model.chunk_us("F", work_of([100]), 2, has_head=False) for model in (loop.fitted.model, COST))
    assert learned == pytest.approx(1.08 * healthy_us, rel=0.01)


def all_slow(of: Callable[[int], float]) -> Truth:
    """Every rank takes `of(iteration)` times as long."""
    return lambda now: {rank: {"F": 1 / of(now), "B": 1 / of(now)} for rank in PLAN.ranks} if of(now) != 1 else {}


@pytest.mark.slow
def test_a_whole_job_that_is_slow_again_and_again_is_named_while_it_is_and_nobody_for_it() -> None:
    """The second time longer than it takes the predictor to learn it as the job's own pace."""
    steps = follow(Loop(SITE), train(all_slow(lambda now: 1.3 if now in range(30, 40) or now >= 52 else 1.0), 92))
    named, over = events(steps, Verdict), events(steps, VerdictClosed)
    assert [(one.verdict, one.cause, one.culprits, one.since_iteration) for one in named] == [
        (1, "unknown", (), 30), (2, "unknown", (), 52)
    ]  # fmt: skip
    assert all(one.at_iteration - one.since_iteration <= 4 for one in named)
    assert all(one.evidence["time_ratio"] == pytest.approx(1.25, abs=0.05) for one in named), "20 ms of each never change"
    assert [(one.verdict, one.until_iteration, one.at_iteration <= 44) for one in over] == [(1, 40, True)]
    assert any(fit.trigger.startswith("drift of +") for fit in events(steps, PredictorFitted))
    assert events(steps, VerdictScored) == []
    assert {step.verdict for step in steps.values()} == {None}, "the Scheduler has no plan for it"


@pytest.mark.slow
def test_a_whole_job_that_becomes_slower_bit_by_bit_is_named() -> None:
    steps = follow(Loop(SITE), train(all_slow(lambda now: 1 + 0.002 * max(now - 20, 0)), 130))
    assert {(one.verdict, one.cause, one.culprits) for one in events(steps, Verdict)} == {(1, "unknown", ())}
    assert events(steps, VerdictClosed) == []


def test_a_replica_that_turns_slow_as_a_whole_is_named_with_doubt() -> None:
    """Its devices excuse each other; over batches drawn anew it is no sequence effect, and nothing that all ranks share."""
    slow_ranks = {rank: {"F": 1 / 1.5, "B": 1 / 1.4} for rank in range(4, 8)}
    steps = follow(Loop(SITE), train(lambda now: slow_ranks if now >= 30 else {}, 60))
    (verdict, *revised) = events(steps, Verdict)
    assert {(one.cause, one.culprits, one.victims) for one in (verdict, *revised)} == {
        ("unknown", (Party(kind="replica", replica=1),), (Party(kind="replica", replica=0),))
    }
    assert abs(verdict.since_iteration - 30) <= 1
    assert verdict.confidence <= 0.5
    assert verdict.sentence.startswith("replica 1 (ranks 4, 5, 6, 7) or its data, and the log does not show which: ")
    assert "devices by themselves" in verdict.evidence["next_step"]
    assert verdict.speed == pytest.approx({"F": 1 / 1.5, "B": 1 / 1.4}, abs=0.02)
    assert {step.verdict for step in steps.values()} == {None}, "the Scheduler has no plan for it"


def test_a_job_of_one_replica_that_turns_slow_is_none_of_its_replica() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=16, micro_batches=16)
    truth = all_slow(lambda now: 1.5 if now >= 30 else 1.0)
    (verdict,) = events(follow(Loop(SITE), train(truth, 40, plan=plan), plan), Verdict)
    assert (verdict.culprits, verdict.evidence["scope"]) == ((), "job")


@pytest.mark.slow
def test_a_suspicion_of_one_rank_that_comes_to_nothing_hides_no_slowdown_of_all() -> None:
    """All ranks take twice as long, one of them a little more: too little to be named for, and suspected ever again."""

    def uneven(now: int) -> Speeds:
        return {rank: {"F": one, "B": one} for rank in PLAN.ranks for one in [0.5 / (1.3 if rank == 3 else 1.0)] if now >= 40}

    loop = Loop(msgspec.structs.replace(SITE, detector=SHARED_MACHINE))
    steps = follow(loop, train(uneven, 110))
    (verdict,) = events(steps, Verdict)
    assert (verdict.culprits, verdict.since_iteration, verdict.at_iteration < 64) == ((), 40, True)
    suspected = [max(rank.score for rank in step.judged.ranks) > 0.25 for now, step in steps.items() if now >= 48]
    assert sum(suspected) > 30


def test_what_is_claimed_of_the_whole_job_would_be_named() -> None:
    """Before, and after a slowdown of just so much began."""
    loop = Loop(SITE)
    limits = events(follow(loop, train(healthy, 40)), DetectionLimit)
    assert "of the whole job by" in limits[-1].why
    smallest = loop.now.monitor.sights[1].smallest_slowdown
    assert smallest is not None
    assert smallest < 1.12
    steps = follow(loop, train(all_slow(lambda _: 1.02 * smallest), 40, first=40))
    assert [one.since_iteration for one in events(steps, Verdict)] == [40]


def test_a_device_believed_slow_is_fitted_as_slow() -> None:
    """After the verdict its times are divided by its speed, iteration by iteration: the healthy reference stays."""
    loop = Loop(SITE)
    follow(loop, train(slow(3, 1 / 1.8, at=30), 70))
    assert loop.fitted is not None
    work = work_of([60, 60, 60])
    for kind in "FB":
        fitted, true = (cost.chunk_us(kind, work, 4, has_head=True) for cost in (loop.fitted.model, COST))
        assert fitted == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("at", [18, 30])
def test_a_slowness_that_takes_long_to_name_is_not_learned_as_healthy(at: int) -> None:
    """Where cores are shared sixteen slow iterations are asked; eight drift. Of two ranks one slow is half of the evidence."""
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=16, micro_batches=8)
    loop = Loop(msgspec.structs.replace(SITE, origin=plan, detector=SHARED_MACHINE))
    steps = follow(loop, train(slow(1, 1 / 1.8, at=at), 80, plan=plan), plan)
    (verdict,) = events(steps, Verdict)
    assert (verdict.culprits[0].rank, verdict.since_iteration, verdict.at_iteration) == (1, at, at + 15)
    first, second = (fit.watermark for fit in events(steps, PredictorFitted))
    assert first < at
    assert second > verdict.at_iteration
    assert loop.fitted is not None
    work = work_of([60, 60, 60])
    for kind in "FB":
        fitted, true = (cost.chunk_us(kind, work, 4, has_head=False) for cost in (loop.fitted.model, COST))
        assert fitted == pytest.approx(true, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "why"), [(3, "rank 3's speed changed"), (6, "another device turned slow")])
def test_a_trial_that_a_slowdown_ends_says_whose(rank: int, why: str) -> None:
    def truth(now: int) -> Speeds:
        return {**slow(3, 0.6, at=20)(now), **slow(rank, 0.3, at=44)(now)}

    loop = Loop(SITE)
    plan = in_trial(loop, truth)
    scores = events(follow(loop, train(truth, 15, plan=plan, first=40), plan), PlanScored)
    assert [score.void for score in scores] == [why]


def test_a_proposal_carries_what_it_was_founded_on() -> None:
    loop = Loop(SITE)
    steps = follow(loop, train(slow(3, 0.6, at=20), 40))
    (proposal,) = [step.proposal for step in steps.values() if step.proposal]
    evidence = proposal.evidence
    assert evidence["predictor"] == 1
    assert evidence["speeds"] == {"3": loop.now.monitor.speeds[3]}
    assert evidence["gain_interval_us"] == proposal.gain_interval_us
    assert evidence["options"] == loop.now.options.scheduler.digest
    assert msgspec.json.decode(msgspec.json.encode(evidence))["speeds"] == evidence["speeds"]


def test_a_plan_that_cannot_be_made_ends_nothing_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(*_: object) -> None:
        raise PlanError("nobody executes layer 3")

    monkeypatch.setattr("unskew.analytics.loop.plans.propose", propose)
    steps = follow(Loop(SITE), train(slow(3, 0.6, at=20), 40))
    assert max(steps) == 39
    assert "no other plan could be made: nobody executes layer 3" in [step.reason for step in steps.values()]


def test_a_rank_that_is_to_come_is_waited_for_but_not_for_ever() -> None:
    """Rank 5 is lost in iteration 20; its next process is started at once, there at last, and never measured."""
    loop = Loop(SITE)
    follow(loop, train(healthy, 20))
    adaptation, _ = loop.now.lost(Suspect(rank=5, how="exit", detail="signal 9"), 20)
    adaptation, plan, answered = adaptation.added(5, 21), recover(PLAN, {5}, 1), {}
    for released in train(healthy, 30, plan=plan, first=20):
        adaptation, step = adaptation.observe(released, plan, frozenset(PLAN.ranks))
        if step.proposal is not None:
            answered[released.committed.iteration] = step.proposal.plan.ranks
    assert answered == {20 + adaptation.options.patience: (0, 1, 2, 3, 4, 6, 7)}


@pytest.mark.parametrize("truth_known", [False, True])
def test_only_where_every_slowness_is_injected_one_without_a_fault_is_called_false(truth_known: bool) -> None:
    loop = Loop(msgspec.structs.replace(SITE, truth_known=truth_known))
    steps = follow(loop, train(slow(3, 0.6, at=20), 40))
    assert len(events(steps, Verdict)) == 1
    assert [score.correct for score in events(steps, VerdictScored)] == [False] * truth_known
    _, (dead, scored) = loop.now.lost(Suspect(rank=5, how="exit", detail="signal 9"), 40)
    assert isinstance(dead, Verdict)
    assert isinstance(scored, VerdictScored)
    assert (scored.correct, scored.by) == (True, "later")


@pytest.mark.slow
@pytest.mark.parametrize("until", [24, 400])
def test_where_nobody_knows_the_truth_later_evidence_scores_a_verdict(until: int) -> None:
    """Rank 3 is slow from iteration 20 on, for good or only until it is named: then it was a passing disturbance."""

    def truth(now: int) -> Speeds:
        return slow(3, 0.6, at=20)(now) if now < until else {}

    loop = Loop(SITE)
    steps = follow(loop, train(truth, 50))
    verdict = events(steps, Verdict)[0]
    scores = [*events(steps, VerdictScored), *[event for event in loop.now.finished() if isinstance(event, VerdictScored)]]
    if until == 400:
        (score,) = scores
        assert (score.verdict, score.correct, score.by) == (verdict.verdict, True, "later")
        assert score.speed_error == pytest.approx(0, abs=0.02)
        assert "times as long as the others in 20 iterations" in (score.truth or "")
    else:  # closed within a few iterations: too little to say, and no score is made up
        assert events(steps, VerdictClosed)
        assert scores == []
