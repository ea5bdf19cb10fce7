"""The controller: one loop that listens (agent, log, commands), decides through analytics, logs the decision, then acts.

It hosts the rendezvous store, must outlive every rank, and never touches a database: it reads the spools that the ranks write,
so detection goes on while the collector is down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import PlanError
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.health.probing import Probe
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.intake import Intake
from unskew.analytics.scheduler.recovery import recover
from unskew.collector.events import (
    Control,
    DeviceJoined,
    DeviceLost,
    Note,
    PlanFailed,
    PlanIssued,
    PlanKept,
    Regrouped,
    Suspected,
    Verdict,
)
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.write.commands import Inbox
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.control.approval_queue import ApprovalQueue
from unskew.runtime.control.control_log import ControlLog
from unskew.runtime.control.membership import Membership
from unskew.runtime.control.plans import Plans
from unskew.runtime.control.watch import LivenessWatch
from unskew.runtime.options import RunOptions
from unskew.runtime.priority import answer_soon
from unskew.runtime.protocol import (
    AnyMessage,
    CommunicationBroken,
    FaultAnnounced,
    Kill,
    MeasureStandby,
    PlanEntered,
    PlanRecord,
    RankExited,
    RankFailed,
    RankFinished,
    RankForked,
    RankSpec,
    StandbyProduct,
    Start,
)

_POLL_S = 0.05
_DRAIN_S = 3.0


class RunFailed(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """The run cannot go on; the message is one sentence: what happened and, where there is one, what to do."""


class Controller:
    """One run, from the first epoch record to the last commit. `on_entries` sees every log entry as it comes."""

    def __init__(
        self,
        options: RunOptions,
        *,
        control_log: ControlLog,
        telemetry: SpoolWriter,
        tail: Tail,
        inbox: Inbox,
        membership: Membership,
        adaptation: Adaptation,
        rank_specs: Sequence[RankSpec],
        node: str,
        on_entries: Callable[[Sequence[Entry]], None],
        check_interrupt: Callable[[], None],
    ) -> None:
        self.options, self.control_log, self.telemetry, self.tail, self.inbox = options, control_log, telemetry, tail, inbox
        self.membership, self.adaptation, self.rank_specs, self.node = membership, adaptation, rank_specs, node
        self.on_entries, self.check_interrupt = on_entries, check_interrupt
        self.intake = Intake()
        self.plans = Plans(options.first_plan(), time.monotonic_ns())
        self.approval_queue = ApprovalQueue(options.mode, options.iterations)
        self.watch = LivenessWatch()
        self.failures: dict[int, RankFailed] = {}
        self.alive: set[int] = set()
        self.finished: set[int] = set()
        self.committed = 0

    def run(self) -> None:
        """Until every living rank has committed every iteration. Raises `RunFailed`."""
        answer_soon()
        self.membership.send(Start(rank_specs=tuple(self.rank_specs)))
        self.control_log.append(self.adaptation.started(), self._issued())
        self._issue(abort=True)
        while not self._done():
            for message in self.membership.poll(_POLL_S):
                self._take(message)
            self._keep_watch()
            self._read_log()
            self._read_commands()
            self.check_interrupt()
        self._drain()

    def _done(self) -> bool:
        """Whether every living rank of the plan in force has committed every iteration."""
        working = self.alive.intersection(self.plans.in_force.ranks)
        return bool(working) and working <= self.finished

    def _drain(self) -> None:
        """Everybody is done: judge what is still in the spools, and close what is open."""
        until = time.monotonic() + _DRAIN_S
        while self.committed < self.options.iterations and time.monotonic() < until:
            self._read_log()
            time.sleep(0.02)
        self.control_log.append(
            *self.adaptation.finish(), *self.approval_queue.expire("the run ended"), *self._give_up("the run ended")
        )

    # --- what the agent says -----------------------------------------------------------------------------------------

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, RankForked):
            self.alive.add(message.rank)
            self.control_log.append(
                DeviceJoined(
                    device=self._rank_spec(message.rank).device_id,
                    rank=message.rank,
                    node=self.node,
                    pid=message.pid,
                    device_class=self._rank_spec(message.rank).device_class,
                )
            )
        elif isinstance(message, RankExited):
            self._lost(message)
        elif isinstance(message, PlanEntered):
            self._entered(message)
        elif isinstance(message, FaultAnnounced):
            event = msgspec.structs.replace(message.fault.event(), announced_us=message.at_us, watermark=self.committed)
            self.adaptation.injected(event)
            self.control_log.append(event)
        elif isinstance(message, CommunicationBroken):
            self.watch.broken(message.plan_version, time.monotonic())
        elif isinstance(message, RankFinished):
            self.finished.add(message.rank)
        elif isinstance(message, RankFailed):
            self._failed(message)
        elif isinstance(message, StandbyProduct) and message.rank not in self.plans.in_force.executors:
            self.control_log.append(
                *self.adaptation.measured(message.rank, message.iteration, message.product_us, self.committed)
            )

    def _failed(self, message: RankFailed) -> None:
        """A rank raised an error and is about to end. One alone is a device's death; two in one epoch share a cause."""
        same_version = [rank for rank, other in self.failures.items() if other.plan_version == message.plan_version]
        if message.fatal or same_version:
            also = f", as did rank {same_version[0]}" if same_version else ""
            raise RunFailed(f"rank {message.rank} cannot go on{also}: {message.detail}")
        self.failures[message.rank] = message

    def _lost(self, message: RankExited) -> None:
        """A rank's process has ended: name it, then reroute its work; on standby it had none."""
        rank = message.rank
        self.alive.discard(rank)
        self.finished.discard(rank)
        detail = self.failures[rank].detail if rank in self.failures else message.detail
        involved = rank in self.plans.involved
        victims = tuple(sorted(self.alive & self.plans.involved)) if involved else ()
        suspect = self.watch.condemned(rank) or Suspect(rank=rank, how="exit", detail=detail, victims=victims)
        iteration = max(self.committed, self.membership.iteration_of(rank))
        lost = self.adaptation.lost(suspect, iteration)
        verdict = next((event.verdict for event in lost if isinstance(event, Verdict)), None)
        self.control_log.append(
            DeviceLost(
                device=self._rank_spec(rank).device_id,
                rank=rank,
                how=suspect.how,
                detail=suspect.detail,
                detected_us=time.monotonic_ns() // 1000,
                watermark=self.committed,
                iteration=iteration,
                victims=suspect.victims,
            ),
            *lost,
            *self.approval_queue.expire(f"rank {rank} was lost"),
            *(self._give_up(f"rank {rank} was lost") if involved else ()),
        )
        if not involved:
            return
        if self.approval_queue.mode == "observe":
            raise RunFailed(f"rank {rank} was lost ({suspect.detail}) and mode observe changes nothing: the run stops")
        try:
            plan = recover(self.plans.base, {rank}, self.plans.next_plan_version)
        except PlanError as error:
            raise RunFailed(str(error)) from error
        recovery = self.approval_queue.recovery(
            plan,
            self.plans.base,
            suspect,
            verdict=verdict,
            iteration=iteration,
            expected_us=self.adaptation.expected_us(plan),
        )
        self.plans.issue(
            plan,
            proposal=self.approval_queue.newest,
            reason=f"rank {rank} was lost ({suspect.how})",
            optional=False,
            asked_ns=message.at_ns,
            old=None,
        )
        self.control_log.append(*recovery, self._issued())
        self._issue(abort=True)

    def _rank_spec(self, rank: int) -> RankSpec:
        return next(rank_spec for rank_spec in self.rank_specs if rank_spec.rank == rank)

    def _give_up(self, reason: str) -> list[Control]:
        """What to log when a pending change of plan will not happen."""
        pending = self.plans.pending
        if pending is None or not pending.optional:
            return []
        return [PlanFailed(plan_version=pending.plan.plan_version, proposal=pending.proposal, reason=reason)]

    def _issued(self) -> PlanIssued:
        """The latest plan, as the log has it before the ranks do."""
        issued = self.plans.pending
        assert issued is not None
        return PlanIssued(
            plan_version=issued.plan.plan_version,
            proposal=issued.proposal,
            optional=issued.optional,
            plan=issued.plan.to_data(),
            watermark=self.committed,
        )

    def _issue(self, *, abort: bool, probe: Probe | None = None) -> None:
        """Send the latest plan to the ranks, with who hands over and leaves, and what they are to measure when it begins."""
        plan = self.plans.latest
        leaving: set[int] = set()
        if abort:
            self.watch.aborted(plan.plan_version)
        else:
            leaving = self.alive.intersection(self.plans.in_force.ranks) - {*plan.ranks}
        self.membership.send(PlanRecord(plan=plan, abort=abort, probe=probe, leaving=tuple(sorted(leaving))))

    def _entered(self, message: PlanEntered) -> None:
        done = self.plans.entered(message, self.alive, self.committed)
        if done is None:
            return
        regrouped = Regrouped(
            plan_version=done.plan.plan_version,
            iteration=done.iteration,
            seconds=done.seconds,
            migrate_seconds=done.migrate_s,
            moved_bytes=done.moved_bytes,
        )
        ended = self.adaptation.applied(done.plan, done.proposal, regrouped, old=done.old)
        self.control_log.append(*ended, done.event, regrouped)

    # --- liveness ----------------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """Kill who hangs; regroup who is cut off. The log has it before it is done."""
        now_s, pulses = time.monotonic(), self.membership.pulses
        longest_work_s = self.membership.longest_work_s if self.committed else None
        for suspect in self.watch.suspects(now_s, pulses, longest_work_s):
            self.control_log.append(Suspected(rank=suspect.rank, how=suspect.how, detail=suspect.detail))
            self.membership.send(Kill(rank=suspect.rank))
        if (found := self.watch.regroup_reason(now_s, pulses)) is None:
            return
        reason, too_often = found
        if too_often:
            raise RunFailed(f"{reason}, and regrouping did not help")
        note = Note(text=f"{reason}: regrouping with the same plan", by="controller")
        given_up = self._give_up(reason)
        plan = self.plans.base.renumbered(self.plans.next_plan_version)
        self.plans.issue(plan, proposal="", reason=reason, optional=False, asked_ns=time.monotonic_ns(), old=None)
        self.control_log.append(note, *given_up, self._issued())
        self._issue(abort=True)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        entries = self.tail.poll()
        for released in self.intake.take((entry.event for entry in entries), self.plans.by_plan_version):
            self._committed(released)
        if entries:
            self.on_entries(entries)

    def _committed(self, released: IterationTelemetry) -> None:
        """One whole committed iteration: judge it, and act on what follows."""
        iteration = released.committed.iteration
        self.committed = iteration + 1
        self.watch.progressed()
        plan = self.plans.by_plan_version[released.committed.plan_version]
        step = self.adaptation.observe(released, plan)
        self.telemetry.append(step.judged)
        self.control_log.append(*step.events)
        if plan.plan_version != self.plans.latest.plan_version or self.committed >= self.options.iterations:
            return
        if step.probe is not None:
            self._issue_probe(step.probe, step.reason)
        elif step.proposal is not None:
            self.control_log.append(*self.approval_queue.propose(step.proposal, step.verdict, step.reason, iteration, plan))
        elif step.reason:
            kept = PlanKept(plan_version=plan.plan_version, at_iteration=iteration, reason=step.reason, verdict=step.verdict)
            self.control_log.append(kept, *self.approval_queue.expire(step.reason))
        self._apply_approved()
        self._measure_standby()

    def _measure_standby(self) -> None:
        """Now and then the ranks that execute nothing measure themselves; it holds nobody up, so in every mode."""
        idle = self.alive - self.plans.in_force.executors
        if idle and self.plans.pending is None and self.committed % self.adaptation.options.probing.standby_every == 0:
            self.membership.send(MeasureStandby(ranks=tuple(sorted(idle)), iteration=self.committed))

    def _issue_probe(self, probe: Probe, reason: str) -> None:
        """Measure suspects at the next boundary, under the same plan; it holds training up, so not in mode observe."""
        if self.approval_queue.mode == "observe" or self.plans.pending is not None:
            return
        plan = self.plans.latest.renumbered(self.plans.next_plan_version)
        self.plans.issue(plan, proposal="", reason=f"probe: {reason}", optional=True, asked_ns=None, old=None)
        self.control_log.append(self._issued())
        self._issue(abort=False, probe=probe)

    def _apply_approved(self) -> None:
        """Send the approved plan to the ranks; one change at a time."""
        if self.plans.pending is not None:
            return
        open_proposal, events = self.approval_queue.take_approved(self.committed)
        self.control_log.append(*events)
        if open_proposal is None:
            return
        self.plans.issue(
            open_proposal.plan.renumbered(self.plans.next_plan_version),
            proposal=open_proposal.proposal,
            reason=f"approved by {open_proposal.approved_by}",
            optional=True,
            asked_ns=None,
            old=self.plans.latest,
        )
        self.control_log.append(self._issued())
        self._issue(abort=False)

    # --- people ------------------------------------------------------------------------------------------------------

    def _read_commands(self) -> None:
        commands = self.inbox.poll()
        for command in commands:
            self.control_log.append(*self.approval_queue.command(command), actor=command.by)
        if commands:
            self._apply_approved()
