"""A new controller does what the one before had logged and may not have done, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import SMALL

from unskew.analytics.core.faults import parse_faults
from unskew.analytics.loop import controller_rules as rules
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.controller_state import ControllerState, Issue, Log, StartRank, StopRun
from unskew.analytics.loop.intake import Intake
from unskew.analytics.loop.site import Site
from unskew.collector.events import (
    CheckpointSaved,
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    PlanApplied,
    PlanIssued,
    RankAdded,
)
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store
from unskew.collector.write.commands import Inbox
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.control.controller import Controller
from unskew.runtime.control.membership import Membership
from unskew.runtime.control.takeover import Takeover, is_logged
from unskew.runtime.node.checkpoints import CheckpointKeeper
from unskew.runtime.protocol import (
    AnyMessage,
    CheckpointPart,
    FaultAnnounced,
    Message,
    PlanEntered,
    RankExited,
    RankFinished,
    RankForked,
)

FIRST = SMALL.first_plan()
JOINED = tuple(DeviceJoined(device=f"d:{rank}", rank=rank, node="d", pid=rank) for rank in FIRST.ranks)
LOST = DeviceLost(device="d:1", rank=1, how="exit", detail="signal SIGKILL", detected_us=0, watermark=0, iteration=0)
APPLIED = PlanApplied(
    plan_version=0, digest=FIRST.digest, proposal="", iteration=0, reason="", plan=FIRST.to_data(), watermark=0
)
FAULT = parse_faults(["kill:rank=1,at=3"], ranks=4, iterations=9, schedule="1f1b")[0]


def logged(*events: Control) -> ControllerState:
    """What the log of a run adds up to that issued its first plan."""
    site = Site(origin=FIRST, iterations=SMALL.iterations, layer_bytes=(1,) * 4, bytes_per_us=1.0, regroup_us=1.0)
    state, _ = rules.started(ControllerState.begin(Adaptation.begin(site)))
    for event in (*JOINED, *events):
        state = state.take(event)
    return state


def test_a_plan_that_was_issued_is_sent_again_and_one_that_is_in_force_is_not() -> None:
    after, (noted, sent) = rules.taken_over(logged())
    assert isinstance(noted, Log)
    assert isinstance(sent, Issue)
    assert (sent.plan, sent.abort, after.plans.next_plan_version) == (FIRST, True, 1)
    assert len(rules.taken_over(logged(APPLIED))[1]) == 1


def test_a_loss_that_no_plan_has_answered_is_answered_and_one_that_was_is_not() -> None:
    state, decisions = rules.taken_over(logged(APPLIED, LOST))
    (issued,) = [one for one in decisions if isinstance(one, Issue)]
    assert (issued.abort, issued.plan.plan_version, 1 in issued.plan.ranks) == (True, 1, False)
    assert issued.reason == "a new controller took over: rank 1 lost meanwhile"
    again, decisions = rules.taken_over(state)
    (issued,) = [one for one in decisions if isinstance(one, Issue)]
    assert (issued.plan.plan_version, again.plans.next_plan_version) == (1, 2)


def test_with_no_plan_left_all_lost_ranks_are_named() -> None:
    state, _ = rules.taken_over(logged(APPLIED, LOST))
    _, decisions = rules.lost(state, msgspec.structs.replace(LOST, rank=3, device="d:3"))
    assert decisions[-1] == StopRun(
        "no living rank holds layers 2, 3 after the loss of rank 3: a checkpoint is needed to go on (lost before: rank 1)",
        no_plan=True,
    )


def test_a_rank_that_was_added_is_started_again_and_one_that_is_there_is_not_taken_for_lost() -> None:
    added = RankAdded(rank=1, process=2, by="auto", reason="", watermark=3)
    state, _ = rules.taken_over(logged(APPLIED, LOST))
    recovered = state.plans.latest
    entered = PlanApplied(plan_version=1, digest="", proposal="", iteration=3, reason="", plan=recovered.to_data(), watermark=3)
    state = state.take(entered).take(added)
    assert [one for one in rules.taken_over(state)[1] if isinstance(one, StartRank)] == [StartRank(added, recovered)]
    there = state.take(msgspec.structs.replace(JOINED[1], pid=77, watermark=3))
    again = there.take(msgspec.structs.replace(entered, plan_version=2, plan=FIRST.renumbered(2).to_data()))
    assert len(rules.taken_over(again)[1]) == 1


class LateReports(Membership):
    """An agent whose ranks were through before its new controller came."""

    def __init__(self, messages: list[AnyMessage]) -> None:
        self._unread, self.statuses, self.longest_work_s = messages, {}, 0.0
        self.finished = {rank: RankFinished(rank=rank, committed=0, unwritten=0) for rank in FIRST.ranks}

    def poll(self, wait_s: float) -> list[AnyMessage]:  # noqa: ARG002 - as the one it stands for
        messages, self._unread = self._unread, []
        return messages

    def send(self, message: Message) -> None:
        pass


def test_what_ranks_reported_that_are_through_is_heard_before_the_run_ends(tmp_path: Path) -> None:
    store, options = Store.locate(tmp_path), msgspec.structs.replace(SMALL, iterations=0)
    control_log, telemetry = ControlStream(store, "r", "run/r", "controller"), SpoolWriter(store, "r", "controller.1")
    state = logged()
    control_log.add(PlanIssued(plan_version=0, proposal="", optional=False, plan=FIRST.to_data(), watermark=0))
    tail, entries = Tail(store, "r"), Tail(store, "r").poll()
    entered = [
        PlanEntered(rank=rank, plan_version=0, iteration=0, began_ns=1, at_ns=2, migrate_s=0.0, moved_bytes=0)
        for rank in FIRST.ranks
    ]
    Controller(
        options,
        control_log=control_log,
        telemetry=telemetry,
        tail=tail,
        inbox=Inbox(store, "r"),
        membership=LateReports([*entered]),
        state=state,
        checkpoints=CheckpointKeeper(store, "r", options.layers),
        rank_spec=lambda rank: pytest.fail(f"rank {rank} is started"),
        node="d",
        on_entries=lambda _: None,
        check_interrupt=lambda: None,
        before=Takeover(entries, [one.event for one in entries if isinstance(one.event, Control)], state, Intake()),
    ).run()
    telemetry.close()
    control_log.close()
    events = [entry.event for entry in Tail(store, "r", only="@").poll()]
    assert [event.plan_version for event in events if isinstance(event, PlanApplied)] == [0]


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (RankForked(rank=1, pid=1), JOINED[1]),
        (RankExited(rank=1, pid=1, detail="", at_ns=0), LOST),
        (FaultAnnounced(fault=FAULT, iteration=3, at_us=5), FaultInjected(kind="kill", rank=1, at_iteration=3)),
        (
            CheckpointPart(rank=1, iterations=4, layers=(0,), bytes=1, seconds=0.1, paused_us=1),
            CheckpointSaved(iterations=4, bytes=1, seconds=0.1, paused_us=1),
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_in_the_log_is_no_news(message: AnyMessage, event: Control) -> None:
    before = [JOINED[1]] if isinstance(event, DeviceLost) else []
    others = [*before, JOINED[2], FaultInjected(kind="kill", rank=1, at_iteration=4)]
    assert not is_logged(message, others)
    assert is_logged(message, [*others, event])
    if isinstance(event, DeviceJoined | DeviceLost):
        assert not is_logged(msgspec.structs.replace(message, pid=77), [*others, event]), "its next process is another"
    assert not is_logged(RankFinished(rank=1, committed=3, unwritten=0), [event])
