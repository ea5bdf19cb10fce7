"""Which plan is in force, whatever the order in which ranks enter plans, die, and new plans are issued."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.runtime.control.plans import Plans
from unskew.runtime.protocol import PlanEntered

FIRST = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)


def entered(rank: int, plan_version: int, iteration: int = 0, at_ns: int = 2_000_000_000) -> PlanEntered:
    return PlanEntered(
        rank=rank,
        plan_version=plan_version,
        iteration=iteration,
        began_ns=1_000_000_000,
        at_ns=at_ns,
        migrate_s=0.25,
        moved_bytes=10,
    )


def issue(plans: Plans, *, optional: bool, old: Plan | None = None) -> Plan:
    plan = FIRST.renumbered(plans.next_plan_version)
    plans.issue(plan, proposal="p1", reason="why", optional=optional, asked_ns=500_000_000, old=old)
    return plan


def test_a_plan_is_in_force_when_the_last_living_member_has_entered_it() -> None:
    plans = Plans(FIRST, asked_ns=500_000_000)
    for rank in (0, 1):
        assert plans.entered(entered(rank, 0), {0, 1, 2}, 0) is None
    done = plans.entered(entered(2, 0, iteration=7, at_ns=3_000_000_000), {0, 1, 2}, 7)
    assert done is not None
    assert (done.iteration, done.seconds, done.moved_bytes, done.event.plan_version) == (7, 2.5, 30, 0)
    assert plans.pending is None


def test_a_recovery_builds_on_a_recovery_under_way_but_gives_an_optional_change_up() -> None:
    plans = Plans(FIRST, asked_ns=0)
    assert plans.base is FIRST
    for rank in range(4):
        plans.entered(entered(rank, 0), {0, 1, 2, 3}, 0)
    issue(plans, optional=True, old=FIRST)
    assert plans.base is FIRST
    recovery = issue(plans, optional=False)
    assert plans.base is recovery


_STEPS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 3), st.integers(0, 6)),
    st.tuples(st.just("die"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("issue"), st.booleans(), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(_STEPS, max_size=40))
def test_only_the_newest_plan_comes_into_force_and_only_with_everybody(steps: list[tuple[str, int, int]]) -> None:
    plans, alive = Plans(FIRST, asked_ns=0), {0, 1, 2, 3}
    in_force: list[int] = []
    heard: set[tuple[int, int]] = set()
    for what, one, plan_version in steps:
        if what == "enter" and plan_version <= plans.latest.plan_version and one in alive:
            heard.add((one, plan_version))
            done = plans.entered(entered(one, plan_version), alive, 0)
            if done is not None:
                assert done.plan is plans.latest
                assert {(rank, done.plan.plan_version) for rank in alive} <= heard
                in_force.append(done.plan.plan_version)
                assert plans.base is done.plan
        elif what == "die" and len(alive) > 1:
            alive.discard(one)
        elif what == "issue":
            plan = issue(plans, optional=bool(one))
            assert plans.by_plan_version[plan.plan_version] is plan
        assert plans.pending is None or not plans.pending.optional or plans.base is not plans.pending.plan
    assert in_force == sorted(set(in_force))
