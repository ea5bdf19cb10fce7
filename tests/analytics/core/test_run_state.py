"""A run's control events folded into its state: verdicts and proposals, each on its own way."""

from __future__ import annotations

from functools import reduce

import msgspec

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.run_state import RunState, fold
from unskew.collector.events import (
    CommandRefused,
    Event,
    ModeChanged,
    PlanApplied,
    PlanApproved,
    PlanFailed,
    PlanProposed,
    PlanRejected,
    PlanScored,
    RunFinished,
    Verdict,
    VerdictClosed,
    VerdictScored,
)

FIRST = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8)


def proposed(name: str, *, verdict: int | None = None) -> PlanProposed:
    return PlanProposed(
        proposal=name,
        plan_version=1,
        digest="",
        optional=True,
        reason="",
        verdict=verdict,
        plan={},
        predicted_us=1,
        baseline_us=2,
        gain_percent=50.0,
        cost_us=1,
        payback_iterations=1,
        at_iteration=3,
    )


def applied(name: str, plan: Plan = FIRST) -> PlanApplied:
    return PlanApplied(
        plan_version=plan.plan_version, digest=plan.digest, proposal=name, iteration=5, reason="", plan=plan.to_data()
    )


def verdict(number: int, speed: float) -> Verdict:
    return Verdict(
        verdict=number,
        cause="slow_device",
        culprits=(),
        speed={"F": speed},
        since_iteration=3,
        at_iteration=5,
        confidence=1.0,
        sentence="",
        evidence={},
    )


def state_of(*events: Event) -> RunState:
    return reduce(lambda state, one: fold(state, one[1], one[0]), enumerate(events), RunState())


def test_proposals_go_their_own_ways() -> None:
    state = state_of(
        *(applied(""), *(proposed(name) for name in "abcde")),
        PlanApproved(proposal="a", by="mira", reason="yes"),
        PlanRejected(proposal="b", by="jon", reason="no"),
        CommandRefused(command="approve c", by="jon", reason="mode observe applies no change"),
        *(PlanApproved(proposal="d", by="mira", reason="yes"), PlanFailed(plan_version=1, proposal="d", reason="rank 1 died")),
        *(applied("a", FIRST.renumbered(1)), PlanApproved(proposal="e", by="mira", reason="yes")),
        PlanScored(plan_version=1, proposal="a", from_iteration=5, to_iteration=9, n=5, effect_s=0.1),
        PlanRejected(proposal="of another run", by="jon", reason="no"),
    )
    assert {name: one.status for name, one in state.proposals.items()} == {
        "a": "scored",
        "b": "rejected",
        "c": "open",
        "d": "failed",
        "e": "approved",
    }
    assert [one.proposed.proposal for one in state.open_proposals] == ["c"]
    refused = state.proposals["c"].refused
    assert refused is not None
    assert refused.reason == "mode observe applies no change"
    assert state.plan is not None
    assert state.plan.plan.plan_version == 1


def test_a_verdict_keeps_its_revisions_its_end_its_score_and_its_answer() -> None:
    opened = state_of(verdict(1, 0.7), verdict(2, 0.6), proposed("a", verdict=1), proposed("b", verdict=1), verdict(1, 0.5))
    assert [one.verdict.speed["F"] for one in opened.open_verdicts] == [0.6, 0.5], "the one revised last comes last"
    assert opened.answer_to(verdict(1, 0.5)) is None
    end = VerdictClosed(verdict=1, until_iteration=8, at_iteration=9, reason="healthy")
    unknown = msgspec.structs.replace(end, verdict=7)
    score = VerdictScored(verdict=1, correct=True, truth="slow", delay_iterations=2, onset_error_iterations=0, speed_error=0.0)
    state = reduce(fold, (applied("a", FIRST.renumbered(1)), end, score, unknown), opened)
    first = state.verdicts[1]
    assert [one.verdict.speed["F"] for one in first.revisions] == [0.7, 0.5]
    assert (first.verdict.speed["F"], first.verdict.until_iteration, first.scored) == (0.5, 8, score)
    assert [one.verdict.verdict for one in state.open_verdicts] == [2]
    assert (state.answer_to(first.verdict), list(state.verdicts)) == (1, [1, 2])


def test_a_plan_answers_all_that_was_wrong_with_devices_and_what_waits_comes_first() -> None:
    sequences = msgspec.structs.replace(verdict(3, 1.0), cause="long_sequences")
    recovery = msgspec.structs.replace(proposed("r", verdict=2), optional=False)
    dead = msgspec.structs.replace(verdict(2, 1.0), cause="dead")
    after_death = state_of(verdict(1, 0.5), sequences, dead, recovery, applied("r", FIRST.renumbered(1)))
    answers = [after_death.answer_to(one) for one in (verdict(1, 0.5), dead, sequences)]
    assert answers == [None, 1, None]
    assert [one.verdict.verdict for one in after_death.by_urgency] == [3, 1, 2]

    asked = reduce(fold, (ModeChanged(mode="approve", by="ann"), proposed("better", verdict=2)), after_death)
    assert asked.waiting == asked.proposals["better"]
    assert [one.verdict.verdict for one in asked.by_urgency] == [1, 2, 3]
    changed = reduce(
        fold, (PlanApproved(proposal="better", by="ann", reason=""), applied("better", FIRST.renumbered(4))), asked
    )
    assert [changed.answer_to(one) for one in (verdict(1, 0.5), dead, sequences)] == [4, 4, None]
    assert changed.waiting is None


def test_in_mode_auto_a_proposal_waits_for_a_person_where_a_lasting_limit_refuses_it_in_observe_none_does() -> None:
    refused = CommandRefused(command="approve a", by="auto", reason="20 changes are made")
    state = state_of(ModeChanged(mode="auto", by="ann"), proposed("a"))
    assert state.waiting is None
    state = fold(state, refused)
    assert state.waiting == state.proposals["a"]
    wrong = fold(state, CommandRefused(command="approve a", by="ann", reason="it does not fit"))
    assert wrong.waiting is not None, "a command that is refused afterwards ends no waiting"
    assert fold(state, ModeChanged(mode="observe", by="ann")).waiting is None
    assert fold(state, RunFinished(status="stopped", iterations=5)).waiting is None
