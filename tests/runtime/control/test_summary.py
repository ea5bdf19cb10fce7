"""A run's summary for programs: what is said of a plan belongs to the version of it that was measured."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.layout import uniform_plan
from unskew.collector.events import CommandRefused, Control, Note, PlanApplied, PlanProposed, PlanScored, RunFinished
from unskew.collector.files.tail import Entry
from unskew.runtime.control.summary import SummaryBuilder

PLAN = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=4)


def applied(plan_version: int, proposal: str) -> PlanApplied:
    plan = PLAN.renumbered(plan_version).to_data()
    return PlanApplied(plan_version=plan_version, digest="", proposal=proposal, iteration=plan_version, reason="", plan=plan)


def optional(name: str) -> PlanProposed:
    return PlanProposed(
        proposal=name, plan_version=1, digest="", optional=True, reason="", verdict=None, plan={}, predicted_us=1,
        baseline_us=2, gain_percent=50.0, cost_us=1, payback_iterations=1, at_iteration=1, change="layers move",
    )  # fmt: skip


def built(*events: Control) -> SummaryBuilder:
    builder = SummaryBuilder()
    for number, event in enumerate(events):
        builder.take(
            Entry(writer="@run", segment=0, seq=number, at_us=0, stream="run", version=number, actor=None, event=event, raw=b"")
        )
    return builder


def test_a_trial_that_went_on_under_another_number_is_scored_there() -> None:
    """A probe or a regrouping gives the plan in force a new number and no proposal of its own."""
    proposed = optional("p1")
    scored = PlanScored(plan_version=2, proposal="p1", from_iteration=1, to_iteration=30, n=20, measured_s=0.5)
    builder = built(applied(0, ""), proposed, applied(1, "p1"), applied(2, ""), scored)
    plans = msgspec.to_builtins(builder.summary("r", "sleep", 0, None, RunFinished(status="done", iterations=30)).plans)
    assert [(plan["epoch"], plan["n"], plan["measured_s"]) for plan in plans] == [(0, 0, None), (1, 0, None), (2, 20, 0.5)]


def test_what_waits_at_the_end_is_there_and_which_limit_of_auto_keeps_it() -> None:
    """Only plans that came into force were: a run that ended while auto waited said nothing of it."""
    waits = "p3 waits until iteration 218: mode auto makes 20 changes in 200 iterations at most"
    left = "mode auto applies gains from 5 % on, this is 3.0 %"
    builder = built(
        applied(0, ""), optional("p1"), applied(1, "p1"), optional("p2"),
        CommandRefused(command="approve p2", by="auto", reason=left), optional("p3"),
        Note(text=waits, by="auto", proposal="p3"),
    )  # fmt: skip
    found = builder.summary("r", "sleep", 0, None, RunFinished(status="done", iterations=30)).proposals
    assert [(one.proposal, one.status, one.limit) for one in found] == [
        ("p1", "applied", ""), ("p2", "open", left), ("p3", "open", waits),
    ]  # fmt: skip
