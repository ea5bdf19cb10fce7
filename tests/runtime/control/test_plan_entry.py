"""When a plan is in force: with the last living member, whatever the order in which they enter and die."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.loop.controller_state import Issue
from unskew.runtime.control.membership import PlanEntry
from unskew.runtime.protocol import PlanEntered

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4).renumbered(2)


def entry() -> PlanEntry:
    return PlanEntry(issued=Issue(plan=PLAN, proposal="p1", reason="why", abort=True), asked_ns=500_000_000)


def entered(rank: int, plan_version: int = 2, iteration: int = 0, at_ns: int = 2_000_000_000) -> PlanEntered:
    return PlanEntered(
        rank=rank,
        plan_version=plan_version,
        iteration=iteration,
        began_ns=1_000_000_000,
        at_ns=at_ns,
        migrate_s=0.25,
        moved_bytes=10,
    )


def test_a_plan_is_in_force_when_the_last_living_member_has_entered_it() -> None:
    plan, alive = entry(), frozenset({0, 1, 2})
    for rank in (0, 1):
        assert plan.take(entered(rank), alive, 7) is None
    done = plan.take(entered(2, iteration=7, at_ns=3_000_000_000), alive, 7)
    assert done is not None
    applied, regrouped = done
    assert (applied.plan_version, applied.iteration, applied.proposal, applied.reason, applied.watermark) == (
        2,
        7,
        "p1",
        "why",
        7,
    )
    assert (regrouped.seconds, regrouped.migrate_seconds, regrouped.moved_bytes) == (2.5, 0.25, 30)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["enter", "die"]), st.integers(0, 3), st.integers(1, 3)), max_size=30))
def test_only_the_plan_that_was_sent_comes_into_force_and_only_with_everybody(steps: list[tuple[str, int, int]]) -> None:
    plan, alive, heard = entry(), frozenset({0, 1, 2, 3}), set()
    for what, rank, plan_version in steps:
        if what == "die" and len(alive) > 1:
            alive -= {rank}
        elif what == "enter" and rank in alive:
            heard |= {rank} if plan_version == 2 else set()
            done = plan.take(entered(rank, plan_version), alive, 0)
            assert (done is not None) == (plan_version == 2 and alive <= heard)
