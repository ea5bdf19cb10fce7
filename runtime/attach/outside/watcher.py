"""The ranks of one run, as their log and their processes show them: judged while they train, by whoever looks.

One thread. It may die at any moment without harm to the training: ranks write to their spools, whoever reads them.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from unskew.analytics.core.code_hash import code_hash
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.next_steps import answers_probes
from unskew.analytics.detector.options import options_for
from unskew.analytics.diagnosis.flight_recorder import explain, in_progress
from unskew.analytics.health.liveness import WAITING, Suspect
from unskew.analytics.loop.intake import Intake
from unskew.analytics.loop.watched import attached_rules as rules
from unskew.analytics.loop.watched import stalled
from unskew.analytics.loop.watched.ends import (
    Exit,
    died,
    died_before,
    first_dead,
    is_stopping,
    left_early,
    lost_another,
    were_stopped,
)
from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.collector.events import (
    CollectiveRecorded,
    Control,
    DeviceJoined,
    DeviceKind,
    DeviceLost,
    Event,
    GroupRecorded,
    Heartbeat,
    IterationCommitted,
    LoaderDivided,
    MicroBatchPacked,
    PlanApplied,
    RankAttached,
    RankDetached,
    RunFinished,
    RunStarted,
    SamplesDrawn,
    Span,
    Telemetry,
    VerdictClosed,
)
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach.acting import ActOptions, JobActing
from unskew.runtime.attach.outside.disk import refusal
from unskew.runtime.attach.outside.exits import Exits, ranks_under

SILENT_S = 60.0
"""Each rank writes twice a second."""
LAST_POLLS = 25
"""Beyond the patience of the intake."""
DEVICE: DeviceKind = "cores"
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""The exit codes of a command that was stopped by a person or a scheduler."""
NO_LENGTHS = "what its batches hold is not known, as no loader of torch gives them: session.note(tokens=...) before backward()"
NOT_KNOWN = "; which of its ranks died first is not known"
LEFT_EARLY = "; rank {rank} had ended before, without an error: did its loader have fewer batches than the others'?"


class JobWatcher:
    """Of one run. `command`: what was started, empty = somebody else has started the ranks."""

    def __init__(
        self,
        store: Store,
        run: str,
        command: Sequence[str],
        on_entry: Callable[[Entry], None],
        act: ActOptions | None = None,
    ) -> None:
        self._store, self._run, self._command, self._on_entry = store, run, command, on_entry
        self._act = act or ActOptions()
        self._acting: JobActing | None = None
        self._offered: list[Event] = []
        self._tail, self._intake = Tail(store, run), Intake(marks_suffice=True)
        self._stream: ControlStream | None = None
        self._spool: SpoolWriter | None = None
        self._state: rules.AttachedState | None = None
        self._attached: dict[int, RankAttached] = {}
        self._detached: dict[int, RankDetached] = {}
        self._exits, self._lost = Exits(), False
        self._started: int | None = None
        self._code: int | None = None
        self._asked_s: float | None = None
        self._beats: dict[int, Heartbeat] = {}
        self._flights: list[CollectiveRecorded | GroupRecorded] = []
        self._packed: set[tuple[int, int]] = set()
        self._lengths = False
        self._marks: dict[int, int] = {}
        self._iterations = 0
        self._stepped_s = self._heard_s = time.monotonic()
        self._unmeasured: dict[int, str] = {}
        self._hung: int | None = None

    def started(self, pid: int) -> None:
        """The command runs as this process."""
        self._started = pid

    def asked_to_stop(self) -> None:
        """Somebody has, as far as is known: ranks that end from now on are nobody's fault. A signal handler may call."""
        self._asked_s = time.monotonic()

    def look(self) -> None:
        """What is new. Who has ended is taken first: by then its last words are in the log, to be read before it is judged."""
        if self._started is not None and not self._everybody():  # a launcher reaps who dies in its first steps in 0.1 s
            self._exits.expect(ranks_under(self._started))
        now_s, gone = time.monotonic(), [*self._exits.seen]
        if gone:
            self._read_all()
        else:
            self._read()
        self._keep_watch(now_s, gone)
        if self._acting is not None:
            self._acting.look(self._iterations)

    def finish(self, code: int) -> RunFinished | None:
        """The command has ended: read to the end, say how."""
        self._code = code
        self.look()
        self._read_out()
        if self._stream is None or self._spool is None:
            return None
        silent = self._attached.keys() - self._detached.keys()
        if silent and (why := refusal(self._store)):
            self._unmeasured[min(silent)] = f"the log lacks what ranks wrote last: {self._store.root} takes no lines ({why})"
        asked, unmeasured = self._stopped(code), "; ".join(self._unmeasured.values())
        left = left_early(self._exits.seen, self._detached, next(iter(self._attached.values())).ranks)
        unnamed = not self.well or any(lost_another(one.error) for one in self._detached.values())
        who = LEFT_EARLY.format(rank=left) if left is not None else NOT_KNOWN if unnamed else ""
        end = RunFinished(
            status="stopped" if asked else "failed" if code else "incomplete" if unmeasured else "done",
            iterations=self._iterations,
            reason=self._ended_with(code) + ("" if asked or self._lost else who) if code or asked else unmeasured,
            committed=None if unmeasured else self._iterations,
        )
        if self._state is not None:
            self._state, events = rules.ended(self._state)
            self._log(events)
        acted = self._acting.finish(self._iterations) if self._acting is not None else ()
        self._log((*acted, *(self._hangs_no_more("all its ranks ended well") if self.well else ()), end))
        self._spool.close()
        self._read_all()
        return end

    @property
    def _stopping(self) -> bool:
        return is_stopping(self._stepped_s, self._asked_s, self._stepped_s)

    def _stopped(self, code: int) -> bool:
        """Whether somebody ended the job, and not what went wrong in it."""
        ranks = next(iter(self._attached.values())).ranks
        by_ends = not self._lost and were_stopped(self._exits.seen, self._detached, ranks)
        return code in STOPPED or self._stopping or by_ends

    def _ended_with(self, code: int) -> str:
        if self._command:
            if self._stopped(code) and code not in STOPPED:
                return f"it was asked to stop, and the command ended with exit code {code}"
            return f"the command ended with exit code {code}"
        if code in STOPPED:
            return "it is not watched any more"
        return "its ranks were stopped" if self._stopped(code) else "not all of its ranks ended well"

    @property
    def over(self) -> bool:
        """Whether all ranks that are known have ended, or nothing was heard of any of them for long."""
        seen, here = {one.rank for one in self._exits.seen}, socket.gethostname()
        ended = {*seen, *(rank for rank, one in self._detached.items() if not one.error or self._attached[rank].node != here)}
        return bool(self._attached) and (self._attached.keys() <= ended or time.monotonic() - self._heard_s >= SILENT_S)

    @property
    def well(self) -> bool:
        """Whether none of its ranks died."""
        return not self._lost and not died(self._exits.seen, self._detached)

    def _read_out(self) -> None:
        """To the end; what is incomplete is given up."""
        self._read_all()
        for _ in range(LAST_POLLS):
            self._read()

    def _read_all(self) -> None:
        self._read()
        while self._tail.behind:
            self._read()

    def close(self) -> None:
        self._exits.close()
        if self._spool is not None:
            self._spool.close()
        if self._stream is not None:
            self._stream.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        entries = self._tail.poll()
        if entries:
            self._heard_s = time.monotonic()
        for entry in entries:
            self._take(entry.event)
        plans: dict[int, Plan] = {} if self._acting is None else self._acting.plans
        for released in self._intake.take([entry.event for entry in entries], plans):
            self._committed(released)
        for entry in entries:
            self._on_entry(entry)

    def _take(self, event: Event | None) -> None:
        match event:
            case RankAttached() if event.rank not in self._attached:
                self._joined(event)
            case RankDetached(unmeasured=why) if why:
                self._unmeasured[event.rank] = f"rank {event.rank} is not measured since iteration {self._iterations}: {why}"
                self._beats.pop(event.rank, None)
            case RankDetached():
                self._detached[event.rank] = event
            case Heartbeat():
                self._beats[event.rank] = event
            case LoaderDivided() | SamplesDrawn():
                self._offered.append(event)
            case Span() if event.kind == "probe" and self._acting is not None:
                self._acting.probed(event)
            case CollectiveRecorded() | GroupRecorded():
                self._flights.append(event)
            case MicroBatchPacked() if self._state is None and event.iteration == 0:
                self._packed.add((event.micro_batch, event.attempt))
                self._lengths = self._lengths or bool(event.lengths)
            case IterationCommitted():
                self._stepped_s, self._flights = time.monotonic(), []
                self._marks[event.rank] = event.iteration
                if self._state is None and self._attached.keys() <= self._marks.keys() and self._everybody():
                    self._begin()

    @property
    def _ranks(self) -> set[int]:
        """Those that take part."""
        return set(self._attached if self._state is None else self._state.plan.ranks)

    def _place_of(self, rank: int) -> tuple[str, int]:
        """Its node and process."""
        return self._attached[rank].node, self._attached[rank].pid

    def _everybody(self) -> bool:
        return bool(self._attached) and len(self._attached) == next(iter(self._attached.values())).ranks

    def _joined(self, event: RankAttached) -> None:
        self._attached[event.rank] = event
        if event.node == socket.gethostname():
            self._exits.watch(event.rank, event.pid)
        if self._stream is None:
            self._stream = ControlStream(self._store, self._run, f"run/{self._run}", "controller")
            self._spool = SpoolWriter(self._store, self._run, "controller")
            started = RunStarted(
                run=self._run,
                device="gpus of a training of your own" if event.on_gpu else "cores of a training of your own",
                device_kind="gpus" if event.on_gpu else DEVICE,
                clock="monotonic",
                mode=self._act.mode,
                ranks=event.ranks,
                options={"command": [*self._command]},
                code=code_hash(),
                version=version("unskew"),
            )
            self._log((started,))
        joined = DeviceJoined(device=f"{event.node}:{event.rank}", rank=event.rank, node=event.node, pid=event.pid)
        self._log((joined,))

    def _begin(self) -> None:
        ranks = sorted(self._attached)
        counts = dict.fromkeys(ranks, 0)
        for number, _ in self._packed:
            counts[ranks[number % len(ranks)]] += 1
        if not self._attached.keys() <= self._marks.keys():  # one is lost, and nobody knows how many it would have had
            counts = dict.fromkeys(ranks, 1)
        plan, why_not = plan_of(self._attached, counts)
        if len(ranks) == 1 and not self._lengths:  # there is only its own past, and nothing to hold that against
            why_not = why_not or NO_LENGTHS
        applied = PlanApplied(
            plan_version=0, digest=plan.digest, proposal="", iteration=0, reason="as it was found", plan=plan.to_data()
        )
        on_gpu = any(one.on_gpu for one in self._attached.values())
        probes = answers_probes("gpus" if on_gpu else DEVICE, len(ranks))
        self._state, events = rules.begin(plan, why_not, options_for(DEVICE), can_be_probed=probes)
        self._log((applied, *events))
        self._acting = JobActing(self._store, self._run, plan, self._act, log=self._log, place_of=self._place_of, on_gpu=on_gpu)

    def _committed(self, released: IterationTelemetry) -> None:
        assert self._state is not None
        assert self._acting is not None
        self._iterations = released.committed.iteration + 1
        if (plan := self._acting.entered(released.committed)) is not None:
            self._state, refitted = rules.applied(self._state, plan, released.committed.iteration)
            self._log(refitted)
        self._state, events = rules.committed(self._state, released)
        self._log(events)
        offered, self._offered = self._offered, []
        self._acting.committed(released, self._state, events, offered)

    def _log(self, events: Sequence[Event], actor: str = "controller") -> None:
        assert self._stream is not None
        assert self._spool is not None
        for event in events:
            if isinstance(event, Telemetry):
                self._spool.append(event)
        if control := [event for event in events if isinstance(event, Control)]:
            self._stream.add(*control, actor=actor)

    # --- who is dead, who hangs --------------------------------------------------------------------------------------

    def _keep_watch(self, now_s: float, gone: Sequence[Exit]) -> None:
        if self._asked_s is not None and self._stopping:
            of_itself = bool(died_before(gone, self._asked_s))
        else:
            of_itself = bool(gone or (self._code and self._attached))
        if of_itself and not self._lost:
            ranks = next(iter(self._attached.values())).ranks
            first = first_dead(gone, self._detached, ranks, len(self._attached), failed=bool(self._code))
            if first is not None:
                self._lost = True
                self._read_out()  # up to the iteration that it was in
                self._lose(first)
        if self._state is None or is_stopping(now_s, self._asked_s, self._stepped_s):
            return
        usual_s = rules.usual_s(self._state.seen)
        ended = {one.rank for one in gone if one.at_s is not None} | (self._attached.keys() - self._ranks)
        beats = {rank: beat for rank, beat in self._beats.items() if rank not in ended}
        if self._unmeasured:  # nobody knows what the others wait for
            beats = {}
        suspect = stalled.hung(now_s - self._stepped_s, usual_s, beats)
        if stalled.is_stalled(now_s - self._stepped_s, usual_s):
            suspect = self._not_joined(suspect, beats)
        if suspect is not None and self._hung is None and not self._lost:
            self._state, events = rules.lost(self._state, suspect, self._iterations)
            self._hung = next((one.verdict for one in events if not isinstance(one, VerdictClosed)), None)  # type: ignore[attr-defined]
            self._log(events)
        elif suspect is None and self._hung is not None and self._stepped_s >= now_s - 1.0:
            self._log(self._hangs_no_more("the job goes on"))

    def _hangs_no_more(self, reason: str) -> tuple[VerdictClosed, ...]:
        number, self._hung = self._hung, None
        at = self._iterations
        return () if number is None else (VerdictClosed(verdict=number, until_iteration=at, at_iteration=at, reason=reason),)

    def _not_joined(self, suspect: Suspect | None, beats: Mapping[int, Heartbeat]) -> Suspect | None:
        """Who holds up the job by the ranks' flight recorders: it did not join a collective in which others wait. Else whom the
        heartbeats name."""
        waiting = {rank for rank, beat in beats.items() if beat.activity in WAITING} or {*beats}  # by their streams alone
        found = explain(*in_progress(self._flights, waiting))
        alive = [rank for rank in found.culprits if rank in beats and not stalled.pauses(beats[rank])]
        if not alive:
            return suspect
        rank = suspect.rank if suspect is not None and suspect.rank in alive else alive[0]
        return Suspect(rank=rank, how="hung", detail="; ".join(found.sentences), victims=found.victims)

    def _lose(self, exited: Exit) -> None:
        rank = exited.rank
        one = self._attached[rank]
        stated = self._detached.get(rank)
        detail = stated.error if stated is not None and stated.error else exited.detail
        victims = tuple(sorted(set(self._attached) - {rank}))
        # What it did last went with it; the others end no step without it.
        at = max(self._iterations, 1 + min((self._marks.get(other, -1) for other in victims), default=-1))
        lost = DeviceLost(
            device=f"{one.node}:{rank}",
            rank=rank,
            how="exit",
            detail=detail,
            detected_us=time.monotonic_ns() // 1000,
            watermark=self._iterations,
            iteration=at,
            victims=victims,
        )
        self._log((lost,))
        if self._state is None and self._everybody():  # before the first step of all was over
            self._begin()
        if self._state is not None:
            suspect = Suspect(rank=rank, how="exit", detail=detail, victims=victims)
            self._state, events = rules.lost(self._state, suspect, at)
            self._log(events)
