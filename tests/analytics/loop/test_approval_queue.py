"""The desk of proposals: what each mode lets through, what people may say, and that nothing is decided twice."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.loop.approval_queue import ApprovalQueue, AutoLimits
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    Control,
    ModeChanged,
    Note,
    PlanApproved,
    PlanExpired,
    PlanIssued,
    PlanProposed,
    PlanRejected,
)

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
ITERATIONS = 100
LIMITS = AutoLimits(most_changes=3, within=40, least_apart=5, least_gain_percent=4.0)
MODES = ("observe", "approve", "auto")


def found(gain_percent: float = 10.0, cost_us: float = 1000.0) -> Proposal:
    return Proposal(
        plan=PLAN, change="", predicted_us=1000.0 - 10 * gain_percent, baseline_us=1000.0, gain_percent=gain_percent,
        gain_interval_us=None, cost_us=cost_us, payback_iterations=1, moved_layers=0, considered=(),
        evidence={"predictor": 1},
    )  # fmt: skip


def queue(mode: str, limits: AutoLimits | None = None) -> ApprovalQueue:
    return ApprovalQueue(iterations=ITERATIONS, mode=mode, limits=limits or AutoLimits())  # type: ignore[arg-type]


def after(approval_queue: ApprovalQueue, events: Iterable[Control]) -> ApprovalQueue:
    for event in events:
        approval_queue = approval_queue.take(event)
    return approval_queue


def lay(approval_queue: ApprovalQueue, proposal: Proposal, iteration: int = 10) -> tuple[ApprovalQueue, str]:
    """Propose; the name it got."""
    events = approval_queue.propose(proposal, None, "slow", iteration, PLAN)
    made = events[-1]
    assert isinstance(made, PlanProposed)
    assert made.evidence == proposal.evidence
    return after(approval_queue, events), made.proposal


def decide(approval_queue: ApprovalQueue, kind: str, target: str) -> Control:
    return approval_queue.command(Command(kind=kind, run="r", by="mira", target=target, reason="because"))  # type: ignore[arg-type]


def settled(approval_queue: ApprovalQueue, iteration: int) -> tuple[ApprovalQueue, PlanProposed | None, list[Control]]:
    """What becomes of it in `iteration`; an approved proposal is issued."""
    events = approval_queue.settle(iteration)
    approval_queue = after(approval_queue, events)
    approved = approval_queue.approved
    if approved is not None:
        issued = PlanIssued(plan_version=1, proposal=approved.proposal, optional=True, plan={}, watermark=iteration)
        approval_queue = approval_queue.take(issued)
    return approval_queue, approved, events


def test_mode_approve_waits_for_a_person() -> None:
    approval_queue, name = lay(queue("approve"), found())
    assert settled(approval_queue, 11) == (approval_queue, None, [])
    approved = decide(approval_queue, "approve", name)
    assert approved == PlanApproved(proposal=name, by="mira", reason="because")
    approval_queue, applied, events = settled(approval_queue.take(approved), 12)
    assert applied is not None
    assert (applied.proposal, events) == (name, [])
    assert settled(approval_queue, 13)[1:] == (None, [])


def test_a_rejected_proposal_is_gone() -> None:
    approval_queue, name = lay(queue("approve"), found())
    rejected = decide(approval_queue, "reject", name)
    assert rejected == PlanRejected(proposal=name, by="mira", reason="because")
    approval_queue = approval_queue.take(rejected)
    assert isinstance(decide(approval_queue, "approve", name), CommandRefused)
    assert settled(approval_queue, 12)[1:] == (None, [])


def test_mode_observe_only_records() -> None:
    approval_queue, name = lay(queue("observe"), found())
    refused = decide(approval_queue, "approve", name)
    assert isinstance(refused, CommandRefused)
    assert "mode observe applies no change" in refused.reason
    assert settled(approval_queue, 12)[1:] == (None, [])
    changed = decide(approval_queue, "mode", "auto")
    assert changed == ModeChanged(mode="auto", by="mira", reason="because")
    assert settled(approval_queue.take(changed), 12)[1] is not None


def test_a_mode_nobody_knows_and_a_proposal_that_is_not_open_are_refused_in_a_sentence() -> None:
    for kind, target, reason in [
        ("mode", "party", "mode party is not known, allowed: observe, approve, auto"),
        ("approve", "p7", "there is no proposal p7: so far none were made"),
    ]:
        assert decide(queue("approve"), kind, target) == CommandRefused(command=f"{kind} {target}", by="mira", reason=reason)


@pytest.mark.parametrize("mode", MODES)
def test_an_open_proposal_that_no_longer_pays_expires(mode: str) -> None:
    approval_queue, _ = lay(queue(mode), found(gain_percent=10.0, cost_us=1000.0))
    _, applied, events = settled(approval_queue, 95)
    assert applied is None
    assert isinstance(events[0], PlanExpired)
    assert "too few iterations are left" in events[0].reason


def test_auto_keeps_apart_from_a_recovery() -> None:
    approval_queue = queue("auto", LIMITS)
    recovery = approval_queue.recovery(PLAN, PLAN, "rank 1 was lost", verdict=None, iteration=20, expected_us=None)
    approval_queue, _ = lay(after(approval_queue, recovery), found(), 22)
    assert [settled(approval_queue, iteration)[1] is not None for iteration in (22, 24, 25)] == [False, False, True]


@pytest.mark.parametrize(
    ("limits", "percent", "words"),
    [
        (AutoLimits(least_gain_percent=30.0), 20.0, "mode auto applies gains from 30 % on, this is 20.0 %"),
    ],
)
def test_a_limit_of_auto_that_lasts_is_said_once_and_leaves_the_proposal_to_people(
    limits: AutoLimits, percent: float, words: str
) -> None:
    approval_queue, name = lay(queue("auto", limits), found(gain_percent=percent))
    approval_queue, applied, events = settled(approval_queue, 11)
    assert (applied, events) == (None, [CommandRefused(command=f"approve {name}", by="auto", reason=words)])
    assert settled(approval_queue, 12)[1:] == (None, [])
    newer, second = lay(approval_queue, found(gain_percent=percent), 13)
    assert [one.command for one in settled(newer, 14)[2] if isinstance(one, CommandRefused)] == [f"approve {second}"]
    approved = decide(approval_queue, "approve", name)
    assert settled(approval_queue.take(approved), 13)[1] is not None


def test_a_limit_that_the_run_does_not_outlast_leaves_the_proposal_to_people() -> None:
    """It was said to wait until an iteration that the run does not have, and nobody was asked."""
    limits = AutoLimits(most_changes=1, within=ITERATIONS)
    approval_queue, _ = lay(queue("auto", limits), found())
    approval_queue, applied, _ = settled(approval_queue, 11)
    assert applied is not None
    approval_queue, name = lay(approval_queue, found(), 30)
    approval_queue, applied, events = settled(approval_queue, 31)
    reason = f"mode auto makes 1 changes in {ITERATIONS} iterations at most, which are made"
    assert (applied, events) == (None, [CommandRefused(command=f"approve {name}", by="auto", reason=reason)])
    assert settled(approval_queue.take(decide(approval_queue, "approve", name)), 33)[1] is not None


def test_a_limit_of_auto_that_passes_is_said_once_before_the_change() -> None:
    approval_queue = queue("auto", LIMITS)
    recovery = approval_queue.recovery(PLAN, PLAN, "rank 1 was lost", verdict=None, iteration=20, expected_us=None)
    approval_queue, name = lay(after(approval_queue, recovery), found(), 22)
    logged: list[Control] = []
    for iteration in (22, 23, 24, 25):
        approval_queue, _, events = settled(approval_queue, iteration)
        logged += events
    noted, approved = logged
    words = f"{name} waits until iteration 25: mode auto keeps changes {LIMITS.least_apart} iterations apart"
    assert noted == Note(text=words, by="auto", proposal=name)
    assert isinstance(approved, PlanApproved)


def test_auto_makes_so_many_changes_in_so_many_iterations_and_goes_on_after_them() -> None:
    approval_queue, made, logged = queue("auto", LIMITS), [], []
    for iteration in range(10, 100):
        if approval_queue.open is None:
            approval_queue, _ = lay(approval_queue, found(), iteration)
        approval_queue, applied, events = settled(approval_queue, iteration)
        made += [iteration] if applied is not None else []
        logged += [event.text for event in events if isinstance(event, Note)]
    assert made == [10, 15, 20, 50, 55, 60, 90]
    assert "p4 waits until iteration 50: mode auto makes 3 changes in 40 iterations at most" in logged


_STEPS = st.one_of(
    st.tuples(st.just("propose"), st.sampled_from([1.0, 4.0, 20.0]), st.sampled_from([0.0, 1000.0])),
    st.tuples(st.sampled_from(["approve", "reject"]), st.integers(1, 4)),
    st.tuples(st.just("mode"), st.sampled_from(MODES)),
    st.tuples(st.sampled_from(["expire", "take", "take", "wait"])),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(first=st.sampled_from(MODES), steps=st.lists(_STEPS, max_size=40))
def test_whatever_happens_each_proposal_ends_once_and_auto_keeps_its_limits(first: str, steps: list[tuple]) -> None:
    approval_queue, now = queue(first, LIMITS), 10
    events: list[Control] = []
    gain_of: dict[str, float] = {}
    taken: list[tuple[str, int]] = []
    for step in steps:
        now += 1
        decided: list[Control] = []
        if step[0] == "propose":
            decided = approval_queue.propose(found(step[1], step[2]), None, "", now, PLAN)
            if decided:  # nothing is laid over a proposal that somebody has approved
                gain_of[decided[-1].proposal] = step[1]  # type: ignore[attr-defined]
        elif step[0] in ("approve", "reject"):
            decided = [decide(approval_queue, step[0], f"p{step[1]}")]
        elif step[0] == "mode":
            decided = [decide(approval_queue, "mode", step[1])]
        elif step[0] == "expire":
            decided = approval_queue.expire("a rank was lost")
        if step[0] != "take":
            approval_queue = after(approval_queue, decided)
            events += decided
            continue
        approval_queue, applied, decided = settled(approval_queue, now)
        events += decided
        if applied is not None:
            # Somebody said so, and it is the newest proposal.
            (approved,) = [e for e in events if isinstance(e, PlanApproved) and e.proposal == applied.proposal]
            assert applied.proposal == max(gain_of, key=lambda name: int(name[1:]))
            if approved.by == "auto":
                assert approval_queue.mode == "auto"
                assert gain_of[applied.proposal] >= LIMITS.least_gain_percent
                assert sum(now - at < LIMITS.within for _, at in taken) < LIMITS.most_changes
                assert not taken or now - taken[-1][1] >= LIMITS.least_apart
            taken.append((applied.proposal, now))
    ends = [e.proposal for e in events if isinstance(e, (PlanRejected, PlanExpired))] + [name for name, _ in taken]
    assert len(ends) == len(set(ends))
    assert set(ends) <= set(gain_of)
    assert len(set(gain_of) - set(ends)) <= 1


def test_a_plan_for_which_ranks_lack_the_memory_is_not_approved() -> None:
    """By nobody; and one that was approved is not applied."""
    lack = "rank 3 would need 40 MiB of memory under it and has room for 30"
    waiting, name = lay(queue("approve"), found())
    command = Command(run="r", kind="approve", target=name, by="ada", reason="")
    refused = waiting.command(command, lack=lack)
    assert isinstance(refused, CommandRefused)
    assert refused.reason == f"proposal {name} does not fit: {lack}"
    approved = after(waiting, [waiting.command(command)])
    for one in (approved, lay(queue("auto"), found())[0]):
        (expired,) = one.settle(20, lack=lack)
        assert isinstance(expired, PlanExpired)
        assert lack in expired.reason
