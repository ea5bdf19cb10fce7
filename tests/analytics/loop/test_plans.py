"""Which plan is in force, whatever the order in which ranks enter plans, die, and new plans are issued."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.loop.plans import Plans
from unskew.collector.events import PlanApplied, PlanFailed, PlanIssued

FIRST = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)


def issued(plan_version: int, *, optional: bool, proposal: str = "p1") -> PlanIssued:
    plan = FIRST.renumbered(plan_version)
    return PlanIssued(plan_version=plan_version, proposal=proposal, optional=optional, plan=plan.to_data(), watermark=3)


def applied(plan_version: int) -> PlanApplied:
    data = FIRST.renumbered(plan_version).to_data()
    return PlanApplied(plan_version=plan_version, digest="", proposal="", iteration=3, reason="", plan=data)


def test_a_recovery_builds_on_a_recovery_under_way_but_gives_an_optional_change_up() -> None:
    plans = Plans(first=FIRST)
    assert (plans.base, plans.applied) == (FIRST, None)
    plans = plans.take(issued(0, optional=False, proposal="")).take(applied(0)).take(issued(1, optional=True))
    assert (plans.base.plan_version, plans.in_force.plan_version) == (0, 0)
    (failed,) = plans.give_up("rank 1 was lost")
    assert failed == PlanFailed(plan_version=1, proposal="p1", reason="rank 1 was lost")
    plans = plans.take(failed).take(issued(2, optional=False))
    assert (plans.base.plan_version, plans.in_force.plan_version) == (2, 0)
    assert plans.give_up("rank 2 was lost") == []


def test_a_change_by_choice_knows_what_it_replaced_and_a_probe_or_a_recovery_replaces_nothing() -> None:
    plans = Plans(first=FIRST).take(issued(0, optional=False, proposal="")).take(applied(0))
    for optional, proposal, old in ((True, "p1", 0), (True, "", None), (False, "p1", None)):
        pending = plans.take(issued(1, optional=optional, proposal=proposal)).pending
        assert pending is not None
        assert (pending.old.plan_version if pending.old else None) == old


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.sampled_from(["optional", "recovery", "apply", "fail"]), max_size=20))
def test_the_plan_in_force_is_the_last_applied_and_a_recovery_never_starts_from_an_optional_one(steps: list[str]) -> None:
    plans, in_force = Plans(first=FIRST).take(issued(0, optional=False, proposal="")), 0
    for step in steps:
        if step in ("optional", "recovery"):
            plans = plans.take(issued(plans.next_plan_version, optional=step == "optional"))
        elif step == "apply" and plans.pending is not None:
            in_force = plans.pending.plan.plan_version
            plans = plans.take(applied(in_force))
            assert plans.pending is None
        elif step == "fail":
            for event in plans.give_up("why"):
                plans = plans.take(event)
        assert plans.in_force.plan_version == in_force
        assert plans.pending is None or (plans.base is plans.pending.plan) != plans.pending.optional
        assert plans.latest.plan_version == max(plans.by_plan_version)
