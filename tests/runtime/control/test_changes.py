"""Plans change in a living run: after a death, by themselves, or when somebody says so, and no digit of the loss changes."""

from __future__ import annotations

import os
import pwd
from functools import partial, reduce
from pathlib import Path

import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import LONG_CHUNKS, Run, light, train

from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.loop.approval_queue import ApprovalQueue, AutoLimits
from unskew.analytics.replay.replay import replay
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    DeviceLost,
    FaultInjected,
    IterationJudged,
    ModeChanged,
    Note,
    PlanApplied,
    PlanApproved,
    PlanExpired,
    PlanIssued,
    PlanProposed,
    PlanRejected,
    PlanScored,
    Regrouped,
    RunFinished,
    Span,
    Verdict,
)
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import CommandError, send
from unskew.dashboard.panels.headline import _of_proposal
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(120), pytest.mark.slow]
USER = pwd.getpwuid(os.getuid()).pw_name
SLOW = "slow:rank=1,factor=2,at=9"


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(LONG_CHUNKS)


def test_a_death_and_then_a_repartition_change_no_digit(tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, "kill:rank=2,at=3", SLOW, base=LONG_CHUNKS)
    assert run.of(RunFinished)[-1].status == "done"
    first, rerouted, *changed = run.of(PlanApplied)
    assert len(changed) >= 1
    assert (first.iteration, rerouted.iteration) == (0, 3)
    assert run.of(Regrouped)[2].moved_bytes > 0
    assert any(span.kind == "migrate" and span.bytes for span in run.of(Span))
    assert run.losses == pytest.approx(undisturbed, rel=0, abs=1e-12)
    assert run.sql("select * from executed($run) where times != 1") == []
    assert {fault.kind for fault in run.of(FaultInjected)} == {"kill", "slow"}
    assert [verdict.cause for verdict in run.of(Verdict)][:2] == ["dead", "slow_device"]
    scored = {score.plan_version: score for score in run.of(PlanScored)}
    assert scored.keys() == {plan.plan_version for plan in run.of(PlanApplied)} - {0}


class Person:
    """Approves the run's first proposal after having looked on for some iterations, and once more when it is in force."""

    def __init__(self) -> None:
        self.judged, self.proposal, self.plans_before = 0, "", 0

    def __call__(self, run: Run, entry: Entry) -> None:
        if isinstance(entry.event, PlanProposed) and not self.proposal:
            self.proposal = entry.event.proposal
        elif isinstance(entry.event, IterationJudged) and self.proposal:
            self.judged += 1
            if self.judged == 4:
                self.plans_before = len(run.of(PlanApplied))
            if self.judged in {4, 8}:
                self.approve(run)

    def approve(self, run: Run) -> None:
        send(run.store, run.id, Command(kind="approve", run=run.id, by="mira", target=self.proposal, reason="it pays"))


def test_in_mode_approve_a_change_waits_for_a_person(tmp_path: Path, undisturbed: list[float]) -> None:
    person = Person()
    run = train(tmp_path, SLOW, base=LONG_CHUNKS, mode="approve", iterations=30, on_event=person)
    assert person.plans_before == 1
    assert PlanApproved(proposal=person.proposal, by="mira", reason="it pays", user=USER) in run.of(PlanApproved)
    changed = run.of(PlanApplied)[1]
    assert (changed.proposal, changed.reason) == (person.proposal, "approved by mira")
    proposed = next(event for event in run.of(PlanProposed) if event.proposal == person.proposal)
    assert (proposed.optional, proposed.digest) == (True, changed.digest)
    assert changed.iteration > proposed.at_iteration + 4
    assert [refused.reason for refused in run.of(CommandRefused)] == [f"proposal {person.proposal} is not open"]
    assert run.losses == pytest.approx(undisturbed[:30], rel=0, abs=1e-12)
    with pytest.raises(CommandError, match=f"run {run.id} has no living controller .* nobody would act on 'approve'"):
        person.approve(run)


def approves_what_auto_leaves(run: Run, entry: Entry) -> None:
    event = entry.event
    if isinstance(event, CommandRefused) and event.by == "auto":
        target = event.command.removeprefix("approve ")
        waiting = reduce(fold, run.events, RunState()).waiting
        reason = "both are slow" if waiting is not None and waiting.proposed.proposal == target else "it waits for nobody"
        send(run.store, run.id, Command(kind="approve", run=run.id, by="mira", target=target, reason=reason))


def test_a_limit_of_auto_that_is_reached_is_said_and_a_person_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One change in a thousand iterations; then another device turns slow."""
    once = partial(ApprovalQueue, limits=AutoLimits(most_changes=1, within=1000))
    monkeypatch.setattr("unskew.analytics.loop.controller_state.ApprovalQueue", once)
    faults = SLOW, "slow:rank=3,factor=3,at=22"
    run = train(tmp_path, *faults, base=LONG_CHUNKS, iterations=60, mode="auto", on_event=approves_what_auto_leaves)
    first, second = run.of(PlanApproved)
    assert (first.by, second.by, second.reason) == ("auto", "mira", "both are slow")
    (reached,) = run.of(CommandRefused)
    assert reached.reason == "mode auto makes 1 changes in 1000 iterations at most, which are made"
    assert reached.command == f"approve {second.proposal}"
    assert [one.proposal for one in run.of(PlanApplied)] == ["", first.proposal, second.proposal]


def test_a_limit_of_auto_that_passes_is_said_and_training_gets_plans_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device turns slow and healthy again and again, more often than auto may change the plan."""
    twice = partial(ApprovalQueue, limits=AutoLimits(most_changes=2, within=40))
    monkeypatch.setattr("unskew.analytics.loop.controller_state.ApprovalQueue", twice)
    stated: list[tuple[str, ...]] = []

    def look(run: Run, entry: Entry) -> None:
        if isinstance(entry.event, Note) and entry.event.by == "auto":
            stated.append(tuple(text for text, _ in _of_proposal(reduce(fold, run.events, RunState()))))

    run = train(tmp_path, f"{SLOW},every=18,on=9", base=light(LONG_CHUNKS), iterations=90, mode="auto", on_event=look)
    at = [issued.watermark or 0 for issued in run.of(PlanIssued) if issued.optional]
    assert len(at) > 2
    assert all(third - first >= 40 for first, third in zip(at, at[2:], strict=False))
    waits = f"waits until iteration {at[0] + 40}: mode auto makes 2 changes in 40 iterations at most"
    notes = [note for note in run.of(Note) if note.text.endswith(waits)]
    assert [note.text for note in notes] == [f"{note.proposal} {waits}" for note in notes] != []
    assert len({note.proposal for note in notes}) == len(notes), "once for each"
    assert stated[: len(notes)] == [(note.text,) for note in notes], "the headline has it"
    assert {one.by for one in run.of(PlanApproved)} == {"auto"}
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()


def test_a_death_is_answered_while_a_proposal_waits_and_the_next_one_waits_for_both(tmp_path: Path) -> None:
    waiting: list[tuple[str, frozenset[int], list[str]]] = []

    def look(run: Run, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, PlanProposed) and event.optional:
            state = reduce(fold, run.events, RunState())
            assert state.waiting is not None
            causes = [one.verdict.cause for one in state.by_urgency]
            waiting.append((state.waiting.proposed.proposal, frozenset(state.waiting.answers), causes))
            if run.of(DeviceLost):
                send(run.store, run.id, Command(kind="approve", run=run.id, by="mira", target=event.proposal, reason="it pays"))

    faults = SLOW, "kill:rank=2,at=24"
    run = train(tmp_path, *faults, base=light(LONG_CHUNKS), iterations=50, mode="approve", on_event=look)
    first, recovery, better, *_ = run.of(PlanProposed)
    assert run.of(PlanExpired)[0] == PlanExpired(proposal=first.proposal, reason="rank 2 was lost")
    assert [(one.proposal, one.by) for one in run.of(PlanApproved)][:2] == [
        (recovery.proposal, "controller"), (better.proposal, "mira"),
    ]  # fmt: skip
    assert [one.proposal for one in run.of(PlanApplied)][:3] == ["", recovery.proposal, better.proposal]
    slow, dead = (one.verdict for one in run.of(Verdict)[:2])
    assert waiting[:2] == [
        (first.proposal, frozenset({slow}), ["slow_device"]),
        (better.proposal, frozenset({slow, dead}), ["slow_device", "dead"]),
    ]


class ChangesTheirMind:
    """Rejects the first proposal, which nobody can approve any more, and some iterations later lets changes be applied."""

    def __init__(self) -> None:
        self.proposal, self.judged = "", 0

    def __call__(self, run: Run, entry: Entry) -> None:
        if isinstance(entry.event, PlanProposed):
            self.proposal = self.proposal or entry.event.proposal
        elif isinstance(entry.event, IterationJudged) and self.proposal:
            self.judged += 1
            if self.judged == 1:
                send(run.store, run.id, Command(kind="reject", run=run.id, by="mira", target=self.proposal, reason="at night"))
            elif self.judged == 3:
                send(run.store, run.id, Command(kind="approve", run=run.id, by="ann", target=self.proposal))
            elif self.judged == 5:
                send(run.store, run.id, Command(kind="mode", run=run.id, by="mira", target="auto", reason="day shift"))


def test_what_a_person_rejects_is_not_applied_and_a_change_of_mode_asks_the_scheduler_anew(tmp_path: Path) -> None:
    run = train(tmp_path, SLOW, base=light(LONG_CHUNKS), mode="approve", iterations=60, on_event=ChangesTheirMind())
    (changed,) = run.of(ModeChanged)
    rejected, anew, *_ = run.of(PlanProposed)
    assert run.of(PlanRejected) == [PlanRejected(proposal=rejected.proposal, by="mira", reason="at night", user=USER)]
    assert [refused.reason for refused in run.of(CommandRefused)] == [f"proposal {rejected.proposal} is not open"]
    assert rejected.proposal not in {plan.proposal for plan in run.of(PlanApplied)}
    assert changed.watermark is not None
    assert rejected.at_iteration < changed.watermark <= anew.at_iteration < changed.watermark + 3
    assert [(one.proposal, one.by) for one in run.of(PlanApproved)] == [(anew.proposal, "auto")]
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()
