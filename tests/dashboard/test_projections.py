"""What the page tells, computed without a page."""

from __future__ import annotations

import pytest

from unskew.analytics.core.plan import Plan, plan_from_partition, uniform_plan
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import CommandRefused, PlanApplied, PlanApproved, PlanProposed, PlanRejected, PlanScored
from unskew.dashboard.panels.plan_view import places
from unskew.dashboard.story import Logged, tell
from unskew.dashboard.wording import ago, duration, ranges, signed_percent

FIRST = uniform_plan(tp=1, pp=2, dp=2, n_layers=8, micro_batches=8)
UNEVEN = plan_from_partition(
    plan_version=1, n_layers=8, schedule="1f1b", members=[(0, 1), (2, 3)], layers=[(5, 3), (4, 4)], micro_batches=(3, 5)
)


def proposed(name: str, plan: Plan = UNEVEN) -> PlanProposed:
    return PlanProposed(
        proposal=name,
        plan_version=plan.plan_version,
        digest=plan.digest,
        optional=True,
        reason="",
        verdict=None,
        plan=plan.to_data(),
        predicted_us=1,
        baseline_us=2,
        gain_percent=50.0,
        cost_us=1,
        payback_iterations=1,
        at_iteration=3,
    )


def applied(name: str, plan: Plan = UNEVEN) -> PlanApplied:
    return PlanApplied(
        plan_version=plan.plan_version, digest=plan.digest, proposal=name, iteration=5, reason="", plan=plan.to_data()
    )


def test_proposals_go_their_own_ways() -> None:
    scored = PlanScored(plan_version=1, proposal="a", from_iteration=5, to_iteration=9, n=5, effect_s=0.1)
    events = [
        *(applied("", FIRST), proposed("a"), proposed("b"), proposed("c")),
        PlanApproved(proposal="a", by="mira", reason="yes"),
        PlanRejected(proposal="b", by="jon", reason="no"),
        CommandRefused(command="b", by="jon", reason="decided already"),
        *(applied("a"), scored),
    ]
    story = tell(Logged(number, "controller", event) for number, event in enumerate(events))
    assert {change.proposed.proposal: change.state for change in story.changes} == {"a": "scored", "b": "rejected", "c": "open"}
    assert [change.proposed.proposal for change in story.open_changes] == ["c"]
    assert story.plan is not None
    assert story.plan.plan_version == 1


def test_plan_names_what_changed_and_leaves_the_dead_in_place() -> None:
    shown = places(UNEVEN, FIRST, {1: 0.5}, {})
    assert [place.was for place in shown[0]] == ["4 layers, 4 mb", "4 layers, 4 mb"]
    assert [place.was for place in shown[1]] == ["4 mb", "4 mb"]
    after = recover(FIRST, {3}, 1)
    shown = places(after, FIRST, {}, {3: FIRST.role_of[3]})
    assert [(place.role.rank, place.dead, place.micro_batches) for place in shown[1]] == [(2, False, 4), (3, True, 0)]
    assert {place.role.rank: place.rerouted_in for place in shown[0]} == {0: 0, 1: 4}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (duration(812_400), "812 ms"),
        (duration(999_600), "1.00 s"),
        (duration(None), "–"),
        (ago(42), "42 s ago"),
        (ago(7_000), "117 min ago"),
        (signed_percent(-0.24), "−24 %"),
        (signed_percent(0.031), "+3.1 %"),
        (ranges([5, 0, 1, 2]), "0–2, 5"),
        (ranges([4, 5]), "4, 5"),
    ],
)
def test_numbers_as_words(said: str, expected: str) -> None:
    assert said == expected
