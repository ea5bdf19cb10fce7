"""The desk of proposals: what each mode lets through, what people may say, and that nothing is decided twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.events import CommandRefused, Control, ModeChanged, PlanApproved, PlanExpired, PlanProposed, PlanRejected
from unskew.collector.write.commands import Command
from unskew.runtime.control.approval_queue import ApprovalQueue, AutoLimits

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
ITERATIONS = 100
LIMITS = AutoLimits(most_changes=3, least_apart=5, least_gain_percent=4.0)
MODES = ("observe", "approve", "auto")


def found(gain_percent: float = 10.0, cost_us: float = 1000.0) -> Proposal:
    return Proposal(
        plan=PLAN, change="", predicted_us=1000.0 - 10 * gain_percent, baseline_us=1000.0, gain_percent=gain_percent,
        gain_interval_us=None, cost_us=cost_us, payback_iterations=1, moved_layers=0, considered=(),
        evidence={"predictor": 1},
    )  # fmt: skip


def lay(approval_queue: ApprovalQueue, proposal: Proposal, iteration: int = 10) -> str:
    """Propose; the name it got."""
    *_, made = approval_queue.propose(proposal, None, "slow", iteration, PLAN)
    assert isinstance(made, PlanProposed)
    assert made.evidence == proposal.evidence
    return made.proposal


def say(approval_queue: ApprovalQueue, kind: str, target: str) -> list[Control]:
    return approval_queue.command(Command(kind=kind, run="r", by="mira", target=target, reason="because"))  # type: ignore[arg-type]


def test_mode_approve_waits_for_a_person() -> None:
    approval_queue = ApprovalQueue("approve", ITERATIONS)
    name = lay(approval_queue, found())
    assert approval_queue.take_approved(11) == (None, [])
    assert say(approval_queue, "approve", name) == [PlanApproved(proposal=name, by="mira", reason="because")]
    open_proposal, events = approval_queue.take_approved(12)
    assert open_proposal is not None
    assert (open_proposal.proposal, open_proposal.approved_by, events) == (name, "mira", [])
    assert approval_queue.take_approved(13) == (None, [])


def test_a_rejected_proposal_is_gone() -> None:
    approval_queue = ApprovalQueue("approve", ITERATIONS)
    name = lay(approval_queue, found())
    assert say(approval_queue, "reject", name) == [PlanRejected(proposal=name, by="mira", reason="because")]
    assert isinstance(say(approval_queue, "approve", name)[0], CommandRefused)
    assert approval_queue.take_approved(12) == (None, [])


def test_mode_observe_only_records() -> None:
    approval_queue = ApprovalQueue("observe", ITERATIONS)
    name = lay(approval_queue, found())
    (refused,) = say(approval_queue, "approve", name)
    assert isinstance(refused, CommandRefused)
    assert "mode observe applies no change" in refused.reason
    assert approval_queue.take_approved(12) == (None, [])
    assert say(approval_queue, "mode", "auto") == [ModeChanged(mode="auto", by="mira", reason="because")]
    assert approval_queue.take_approved(12)[0] is not None


def test_a_mode_nobody_knows_and_a_proposal_that_is_not_open_are_refused_in_a_sentence() -> None:
    approval_queue = ApprovalQueue("approve", ITERATIONS)
    for kind, target, reason in [
        ("mode", "party", "mode party is not known, allowed: observe, approve, auto"),
        ("approve", "p7", "proposal p7 is not open"),
    ]:
        assert say(approval_queue, kind, target) == [CommandRefused(command=f"{kind} {target}", by="mira", reason=reason)]


@pytest.mark.parametrize("mode", MODES)
def test_an_open_proposal_that_no_longer_pays_expires(mode: str) -> None:
    approval_queue = ApprovalQueue(mode, ITERATIONS)  # type: ignore[arg-type]
    lay(approval_queue, found(gain_percent=10.0, cost_us=1000.0))
    open_proposal, events = approval_queue.take_approved(95)
    assert open_proposal is None
    assert isinstance(events[0], PlanExpired)
    assert "too few iterations are left" in events[0].reason


def test_auto_keeps_apart_from_a_recovery() -> None:
    approval_queue = ApprovalQueue("auto", ITERATIONS, LIMITS)
    approval_queue.recovery(PLAN, PLAN, Suspect(rank=1, how="exit", detail=""), verdict=None, iteration=20, expected_us=None)
    lay(approval_queue, found(), 22)
    assert [approval_queue.take_approved(iteration)[0] is not None for iteration in (22, 24, 25)] == [False, False, True]


_STEPS = st.one_of(
    st.tuples(st.just("propose"), st.sampled_from([1.0, 4.0, 20.0]), st.sampled_from([0.0, 1000.0])),
    st.tuples(st.sampled_from(["approve", "reject"]), st.integers(1, 4)),
    st.tuples(st.just("mode"), st.sampled_from(MODES)),
    st.tuples(st.sampled_from(["expire", "take", "take", "wait"])),
)


@settings(max_examples=400, deadline=None)
@given(first=st.sampled_from(MODES), steps=st.lists(_STEPS, max_size=40))
def test_whatever_happens_each_proposal_ends_once_and_auto_keeps_its_limits(first: str, steps: list[tuple]) -> None:
    approval_queue, now = ApprovalQueue(first, ITERATIONS, LIMITS), 10  # type: ignore[arg-type]
    events: list[Control] = []
    gain_of: dict[str, float] = {}
    taken: list[tuple[str, int]] = []
    for step in steps:
        now += 1
        if step[0] == "propose":
            made = approval_queue.propose(found(step[1], step[2]), None, "", now, PLAN)
            events += made
            if made:  # nothing is laid over a proposal that somebody has approved
                gain_of[made[-1].proposal] = step[1]  # type: ignore[attr-defined]
        elif step[0] in ("approve", "reject"):
            events += say(approval_queue, step[0], f"p{step[1]}")
        elif step[0] == "mode":
            events += say(approval_queue, "mode", step[1])
        elif step[0] == "expire":
            events += approval_queue.expire("a rank was lost")
        elif step[0] == "take":
            open_proposal, said = approval_queue.take_approved(now)
            events += said
            if open_proposal is not None:
                # Somebody said so, and it is the newest proposal.
                (approved,) = [e for e in events if isinstance(e, PlanApproved) and e.proposal == open_proposal.proposal]
                assert approved.by == open_proposal.approved_by
                assert open_proposal.proposal == max(gain_of, key=lambda name: int(name[1:]))
                if approved.by == "auto":
                    assert approval_queue.mode == "auto"
                    assert gain_of[open_proposal.proposal] >= LIMITS.least_gain_percent
                    assert len(taken) < LIMITS.most_changes
                    assert not taken or now - taken[-1][1] >= LIMITS.least_apart
                taken.append((open_proposal.proposal, now))
    ends = [e.proposal for e in events if isinstance(e, (PlanRejected, PlanExpired))] + [name for name, _ in taken]
    assert len(ends) == len(set(ends))
    assert set(ends) <= set(gain_of)
    assert len(set(gain_of) - set(ends)) <= 1
