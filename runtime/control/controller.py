"""The controller: one loop that listens (agent, log, commands), lets the rules decide (analytics/loop/controller_rules.py),
logs the decision, then acts.

It never touches a database: it reads the spools that the ranks write,
so detection goes on while the collector is down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop import controller_rules as rules
from unskew.analytics.loop.controller_state import ControllerState, Issue, Log, MeasureIdle, Outcome, StartRank, StopRun
from unskew.analytics.loop.intake import Intake
from unskew.collector.command import Command
from unskew.collector.events import (
    DeviceJoined,
    DeviceLost,
    Fault,
    FaultInjected,
    IterationJudged,
    ProcessEnded,
    RankAdded,
    StandbyMeasured,
    Suspected,
)
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.paths import StoreError
from unskew.collector.write.commands import Inbox
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.control.membership import Membership, PlanEntry
from unskew.runtime.control.quorums import QuorumKeeper, formed
from unskew.runtime.control.stuck import NoPlanLeft, RunError
from unskew.runtime.control.takeover import Takeover, is_logged
from unskew.runtime.control.watch import LivenessWatch
from unskew.runtime.node.checkpoints import CheckpointKeeper
from unskew.runtime.options import RunOptions
from unskew.runtime.priority import answer_soon
from unskew.runtime.protocol import (
    AnyMessage,
    CheckpointPart,
    CommunicationBroken,
    FaultAnnounced,
    Joining,
    Judged,
    Kill,
    MeasureStandby,
    PlanEntered,
    PlanRecord,
    QuorumFound,
    QuorumProposal,
    RankExited,
    RankFailed,
    RankForked,
    RankSpec,
    StandbyProduct,
    Start,
    writer_of,
)

_POLL_S = 0.05
_DRAIN_S = 3.0


class Controller:
    """One run, from the first plan record to the last commit. `on_entries` sees every log entry as it comes."""

    def __init__(
        self,
        options: RunOptions,
        *,
        control_log: ControlStream,
        telemetry: SpoolWriter,
        tail: Tail,
        inbox: Inbox,
        membership: Membership,
        state: ControllerState,
        checkpoints: CheckpointKeeper,
        rank_spec: Callable[[int], RankSpec],
        node: str,
        on_entries: Callable[[Sequence[Entry]], None],
        check_interrupt: Callable[[], None],
        before: Takeover | None = None,
    ) -> None:
        self.options, self.control_log, self.telemetry, self.tail, self.inbox = options, control_log, telemetry, tail, inbox
        self.membership, self.checkpoints, self.rank_spec, self.node = membership, checkpoints, rank_spec, node
        self.on_entries, self.check_interrupt = on_entries, check_interrupt
        self.intake = before.intake if before is not None else Intake(options.first_iteration)
        self.state, self.before = state, before
        self.entry: PlanEntry | None = None
        self.watch, self.quorums = LivenessWatch(), QuorumKeeper()
        self.failures: dict[int, RankFailed] = {}

    def run(self) -> None:
        """Until every living rank has committed every iteration. Raises `RunError`."""
        answer_soon()
        if self.before is None:
            asked_ns = time.monotonic_ns()
            self.membership.send(Start(rank_specs=tuple(map(self.rank_spec, range(self.options.ranks)))))
            self._carry_out(rules.started(self.state), asked_ns)
        else:
            self.watch.aborted(self.before.newest_abort)
            for lost in self.before.cut_off:
                self.watch.spare(Suspect.of(lost), time.monotonic())
            self._carry_out(rules.taken_over(self.state))
            if self.state.adaptation.site.by_replica:  # which quorum the ranks have of the one before is not known
                self._carry_out(rules.cut_off(self.state, "a new controller took over"), time.monotonic_ns())
        done = False
        while not done:
            for message in self.membership.poll(_POLL_S):
                self._take(message)
            self._keep_watch()
            self._read_log()
            commands, refused = self.inbox.poll()
            if refused:
                self.control_log.add(*refused)
            if commands:
                self._carry_out(rules.commanded(self.state, commands))
            self._start_again()
            if self.control_log.removed:
                raise RunError("its folder in spool/ was removed while it went on: the log of the run is lost")
            self.check_interrupt()
            done = self._done()  # last: of ranks that were through before a takeover there are reports to hear
        self._drain()

    def _done(self) -> bool:
        """Whether every living rank of the plan in force has committed every iteration."""
        working = self.state.alive.intersection(self.state.plans.in_force.ranks)
        return bool(working) and working <= self.membership.finished.keys()

    def _drain(self) -> None:
        """Everybody is done: judge what is still in the spools, and close what is open."""
        until = time.monotonic() + _DRAIN_S
        while self.state.committed < self.options.iterations and time.monotonic() < until:
            self._read_log()
            time.sleep(0.02)
        self._carry_out(rules.finished(self.state))

    def _carry_out(self, outcome: Outcome, asked_ns: int | None = None) -> None:
        """Do what the rules decided, in order. `asked_ns`: when the reason for a plan that aborts was noticed."""
        self.state, decisions = outcome
        for decision in decisions:
            match decision:
                case IterationJudged():
                    self.telemetry.append(decision)
                case Log(events, actor):
                    self.control_log.add(*events, actor=actor)
                case Issue(plan=plan):
                    self.entry = PlanEntry(issued=decision, asked_ns=asked_ns)
                    self.quorums.issued(plan, abort=decision.abort)
                    if decision.abort:
                        self.watch.aborted(plan.plan_version)
                    self.membership.send(
                        PlanRecord(plan=plan, abort=decision.abort, probe=decision.probe, leaving=decision.leaving)
                    )
                case MeasureIdle(ranks, iteration):
                    self.membership.send(MeasureStandby(ranks=ranks, iteration=iteration))
                case StartRank(added, plan):
                    self.membership.send(Start(rank_specs=(self._again(added, plan),)))
                case StopRun(reason, no_plan):
                    raise NoPlanLeft(reason, self.state) if no_plan else RunError(reason)

    # --- what the agent sends ----------------------------------------------------------------------------------------

    def _take(self, message: AnyMessage) -> None:
        if self.before is not None and is_logged(message, self.before.control):
            return
        match message:
            case RankForked():
                self._carry_out(rules.joined(self.state, self._device_joined(message.rank, message.pid)))
            case RankExited() if message.rank in self.state.rejoining.cut_off:
                self.watch.gone(message.rank)
                ended = ProcessEnded(rank=message.rank, detail=message.detail, watermark=self.state.committed)
                self._carry_out(rules.ended(self.state, ended))
            case RankExited():
                self._carry_out(rules.lost(self.state, self._device_lost(message)), message.at_ns)
            case PlanEntered():
                self._note_entry(message)
            case FaultAnnounced():
                self._announced(message.fault, message.at_us)
            case CommunicationBroken():
                self.watch.broken(message.plan_version, time.monotonic())
            case RankFailed():
                self._failed(message)
            case QuorumProposal():
                self._find_quorum(message)
            case CheckpointPart():
                if noted := self.checkpoints.take(message):
                    with suppress(StoreError):  # no decision hangs on it: where the disk is full, training goes on
                        self.control_log.add(noted)
            case StandbyProduct() if message.rank not in self.state.plans.in_force.executors:
                product = StandbyMeasured(
                    rank=message.rank,
                    iteration=message.iteration,
                    product_us=message.product_us,
                    slowdown=None,
                    watermark=self.state.committed,
                )
                self._carry_out(rules.measured(self.state, product))

    def _note_entry(self, message: PlanEntered) -> None:
        done = self.entry and self.entry.take(message, self.state.alive, self.state.committed)
        if done:
            self.entry = None
            self._carry_out(rules.applied(self.state, *done))

    def _find_quorum(self, proposal: QuorumProposal) -> None:
        quorum = self.quorums.take(proposal)
        if isinstance(quorum, str):
            raise RunError(quorum)
        if quorum is not None:
            self.telemetry.append(formed(quorum))
            self.membership.send(QuorumFound(quorum=quorum))

    def _announced(self, fault: Fault, at_us: int) -> None:
        known = {"announced_us": at_us, "watermark": self.state.committed}
        event = FaultInjected(**{**msgspec.structs.asdict(fault), **known})
        self._carry_out(rules.injected(self.state, event))

    def _start_again(self) -> None:
        """Carry out the faults that are no rank's own: processes that are started for lost ones."""
        done = {(fault.kind, fault.rank, fault.at_iteration) for fault in self.state.adaptation.scoring.faults}
        for fault in self.options.faults:
            due = fault.kind == "rejoin" and fault.at_iteration <= self.state.committed
            if due and (fault.kind, fault.rank, fault.at_iteration) not in done:
                self._announced(fault, time.time_ns() // 1000)
                command = Command(
                    kind="rank",
                    run=self.rank_spec(fault.rank).run,
                    target=str(fault.rank),
                    by="fault",
                    reason="as asked with --fault",
                )
                self._carry_out(rules.commanded(self.state, [command]))

    def _failed(self, message: RankFailed) -> None:
        """A rank raised an error and is about to end. One alone is a device's death; two under one plan version share a
        cause."""
        same_version = [rank for rank, other in self.failures.items() if other.plan_version == message.plan_version]
        if message.fatal or same_version:
            also = f", as did rank {same_version[0]}" if same_version else ""
            raise RunError(f"rank {message.rank} cannot go on{also}: {message.detail}")
        self.failures[message.rank] = message

    def _again(self, added: RankAdded, plan: Plan) -> RankSpec:
        """Of a process that joins beside the run."""
        # The iteration in which its last process was lost may not be judged yet; nothing of it happens once more.
        last = max(self.state.rejoining.losses.get(added.rank, ()), default=-1)
        joins = Joining(plan=plan, committed=max(added.watermark, last + 1))
        writer = writer_of(added.rank, added.process)
        return msgspec.structs.replace(self.rank_spec(added.rank), writer=writer, joins=joins)

    def _device_joined(self, rank: int, pid: int) -> DeviceJoined:
        self.failures.pop(rank, None)
        rank_spec = self.rank_spec(rank)
        return DeviceJoined(
            device=rank_spec.device_id,
            rank=rank,
            node=self.node,
            pid=pid,
            device_class=rank_spec.device_class,
            watermark=self.state.committed,
        )

    def _device_lost(self, message: RankExited) -> DeviceLost:
        """Why a rank's process has ended, and who waits for it: nobody for one on standby."""
        rank, involved = message.rank, self.state.plans.involved
        detail = self.failures[rank].detail if rank in self.failures else message.detail
        others = tuple(sorted((self.state.alive & involved) - {rank}))
        suspect = self.watch.condemned(rank) or Suspect(rank=rank, how="exit", detail=detail, victims=others)
        # Who waited for a whole group when one on standby hung waited for the group, where that one is no member.
        return self._lost(suspect if rank in involved else msgspec.structs.replace(suspect, victims=()))

    def _lost(self, suspect: Suspect, *, cut_off: bool = False) -> DeviceLost:
        rank = suspect.rank
        return DeviceLost(
            device=self.rank_spec(rank).device_id,
            rank=rank,
            how=suspect.how,
            detail=suspect.detail,
            detected_us=time.monotonic_ns() // 1000,
            watermark=self.state.committed,
            iteration=max(self.state.committed, self.membership.iteration_of(rank)),
            victims=suspect.victims,
            cut_off=cut_off,
        )

    # --- liveness ----------------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """Kill who hangs; go on without who is frozen or whom no signal ends; regroup whose communication broke. The log has it
        before it is done."""
        now_s = time.monotonic()
        self._keep_watch_of_frozen(now_s)
        statuses = {rank: status for rank, status in self.membership.statuses.items() if rank in self.state.alive}
        spare = not self.state.adaptation.site.by_replica  # there a whole replica goes, whatever its rank does
        longest_work_s = self.membership.longest_work_s if self.state.committed else None
        for suspect in self.watch.suspects(now_s, statuses, longest_work_s, spare=spare):
            self.control_log.add(Suspected(rank=suspect.rank, how=suspect.how, detail=suspect.detail))
            if not spare or suspect.how != "frozen":
                self.membership.send(Kill(rank=suspect.rank))
            elif rules.can_spare(self.state, suspect.rank):
                self._carry_out(rules.lost(self.state, self._lost(suspect, cut_off=True)), time.monotonic_ns())
        for suspect in self.watch.unkillable(now_s):
            self._carry_out(rules.lost(self.state, self._lost(suspect, cut_off=True)), time.monotonic_ns())
        if (found := self.watch.regroup_reason(now_s, statuses)) is None:
            return
        reason, too_often = found
        if too_often:
            raise RunError(f"{reason}, and regrouping did not help")
        self._carry_out(rules.cut_off(self.state, reason), time.monotonic_ns())

    def _keep_watch_of_frozen(self, now_s: float) -> None:
        """Whose process goes on comes back with it; who stays frozen is killed."""
        for rank in self.watch.returned(self.membership.statuses):
            if rank in self.state.rejoining.cut_off:
                self._carry_out(rules.joined(self.state, self._device_joined(rank, self.membership.pids[rank])))
        for rank in self.watch.overdue(now_s, self.state.alive):
            self.membership.send(Kill(rank=rank))

    # --- the log -----------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        entries = self.tail.poll()
        events = (entry.event for entry in entries)
        for released in self.intake.take(events, self.state.plans.by_plan_version):
            self.watch.progressed()
            self._carry_out(rules.committed(self.state, released))
            if self.options.device == "virtual":
                self.membership.send(Judged(iterations=self.state.committed))
        if entries:
            self.on_entries(entries)
