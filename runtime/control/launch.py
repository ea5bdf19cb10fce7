"""One run from options to summary: opens the log, starts the agent, lets the controller work, and leaves nothing behind."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from unskew.analytics.core.code_hash import code_hash
from unskew.analytics.core.constants import constant
from unskew.analytics.core.packing import PackingError
from unskew.analytics.core.plan import PlanError
from unskew.analytics.detector.options import options_for
from unskew.analytics.health.liveness import LivenessOptions
from unskew.analytics.health.timeouts import too_early
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.controller_state import ControllerState
from unskew.analytics.loop.site import AdaptationOptions, Site
from unskew.analytics.pipeline.memory import Room
from unskew.analytics.replay.causes import ReplayError
from unskew.collector.events import RunFinished, RunStarted
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import Inbox, hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.control.allowed import check
from unskew.runtime.control.controller import Controller
from unskew.runtime.control.ending import ending
from unskew.runtime.control.interrupts import Interrupts
from unskew.runtime.control.membership import AgentLost, Membership
from unskew.runtime.control.resume import losses_before
from unskew.runtime.control.stuck import NoPlanLeft, RunError, wait_for_ranks
from unskew.runtime.control.summary import Summary, SummaryBuilder, Verification
from unskew.runtime.control.takeover import Takeover, folder_of, taken_over
from unskew.runtime.control.timeouts import ladder
from unskew.runtime.corpus import CorpusError
from unskew.runtime.model.layer_sizes import element_bytes, memory_of, parameters_of, sync_of
from unskew.runtime.node.checkpoints import CheckpointKeeper
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.own import OwnError
from unskew.runtime.placement import Placement, cores, place
from unskew.runtime.protocol import Prepare, RankSpec, Ready, Stop, writer_of

_PREPARE_S = 120.0
FT_HSDP: Literal["ft-hsdp"] = "ft-hsdp"
# What a change of plan costs on loopback, until the run has measured its own: standstill, and bytes per microsecond.
_REGROUP_US = 300_000.0
_BYTES_PER_US = 200.0
# Of a parameter the value and two moments move.
_MOVED = 3


def run(
    options: RunOptions,
    *,
    on_event: Callable[[Entry], None] = lambda _: None,
    on_tick: Callable[[], None] = lambda: None,
    living: str | None = None,
) -> Summary:
    """Train by `options` and return the result; `on_event` sees every log entry, `on_tick` is called often.

    `living`: a run of these options whose ranks wait for a controller, which is taken over in place of a new one.

    With `options.verify` the same seed is also run without faults, on the virtual device, and the losses are compared.
    Raises `ValueError` for bad options before anything starts; `KeyboardInterrupt` leaves a finished log.
    """
    options = prepared(options)
    check(options)
    if living is None:
        check_room(options)
    session = Session(options, on_event, on_tick, living)
    session.perform()
    losses = session.builder.losses
    while session.next is not None:
        session = Session(session.next, on_event, on_tick)
        session.perform()
        losses |= session.builder.losses
    verification = None
    if options.verify:
        undisturbed = msgspec.structs.replace(options, faults=(), device="virtual", mode="observe", verify=False)
        reference = Session(undisturbed, lambda _: None, on_tick)
        reference.perform()
        verification = _compare(losses, reference.builder.losses)
    return session.summary(verification)


def prepared(options: RunOptions) -> RunOptions:
    """The options with what is measured of a model and data of somebody's own, the layers whose costs are asked for, the layout
    that degrees say, and the recovery that the policy is. Raises `OptionsError`."""
    options = options.with_costs().with_degrees()
    if FT_HSDP in (options.policy, options.recovery) and options.policy in ("unskew", FT_HSDP):
        options = msgspec.structs.replace(options, policy=FT_HSDP, recovery=FT_HSDP)
    if options.model is None and options.data is None:
        return options
    from unskew.runtime.model.own_model import measured  # noqa: PLC0415 - torch: seconds that our own model saves

    try:
        return measured(options)
    except (OwnError, CorpusError, PackingError) as error:
        raise OptionsError(str(error)) from error


class Session:
    """One run in one store. `next`: the options of the run that goes on with it at once, None when it has ended."""

    def __init__(
        self,
        options: RunOptions,
        on_event: Callable[[Entry], None],
        on_tick: Callable[[], None],
        living: str | None = None,
    ) -> None:
        self._options, self._on_event, self._on_tick = options, on_event, on_tick
        self._store = Store.locate(options.store)
        self._living = living is not None
        self.run_id = living or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self.builder = SummaryBuilder()
        self.end = RunFinished(status="failed", iterations=0, reason="it did not begin")
        self._device = ""
        self.next: RunOptions | None = None

    def perform(self) -> None:
        """The whole run. What happens, also a failure, is in the log when it returns or raises, where the disk takes it; how it
        ended is in `end`."""
        if wrong := too_early(ladder(LivenessOptions())):
            raise ValueError(f"the timeouts do not climb: {'; '.join(wrong)}")
        self._store.enter()
        with Interrupts() as interrupts, hold_controller_lock(self._store, self.run_id):
            control_log = ControlStream(self._store, self.run_id, f"run/{self.run_id}", "controller")
            tail = Tail(self._store, self.run_id)
            # Each process has its own name; versions only grow.
            writer = f"controller.{control_log.version}" if self._living else "controller"
            telemetry = SpoolWriter(self._store, self.run_id, writer)
            log = self._store.root / "logs" / f"{self.run_id}.log"
            membership = Membership(log, folder_of(self._store, self.run_id) if self._living else None)
            status: Literal["done", "failed", "stopped"] = "done"
            reason = ""

            def meanwhile() -> None:
                self._entries(tail.poll())
                interrupts.check()

            try:
                try:
                    self._train(control_log, telemetry, tail, membership, interrupts.check)
                except NoPlanLeft as stuck:
                    if self._options.when_stuck == "stop":
                        raise
                    self.next = wait_for_ranks(
                        stuck, self._options, self._store, self.run_id,
                        control_log=control_log, membership=membership, meanwhile=meanwhile,
                    )  # fmt: skip
                    raise
            except (RunError, AgentLost, StoreError) as failure:
                status, reason = "failed", str(failure)
            except KeyboardInterrupt:
                status, reason = "stopped", "Ctrl-C, SIGTERM or SIGHUP"
                raise
            except BaseException as error:
                status, reason = "failed", f"the controller failed: {type(error).__name__}: {error}"
                raise
            finally:
                membership.stop(Stop())
                telemetry.close()
                # What was refused and did not end the run is a checkpoint's news, which the checkpoint itself holds.
                undecided = control_log.unwritten if status == "failed" else 0
                self._read_all(tail)
                self.end = ending(
                    status,
                    reason,
                    committed=max(membership.committed - self._options.first_iteration, 0),
                    reports=membership.finished.values(),
                    logged=self.builder.losses,
                    last_logged=self.builder.last_logged,
                    node=membership.last_word,
                    unwritten=telemetry.unwritten + undecided,
                )
                self.end = _log_end(control_log, self.end)
                control_log.close()
                self._read_all(tail)

    def summary(self, verification: Verification | None) -> Summary:
        """the result of the run; asks the store what it holds."""
        with open_store(self._store) as reader:
            stored = reader.sql("select count(*) as n from events where run = ?", [self.run_id])["n"][0]
            earlier = losses_before(reader, self._options.resume)
        return self.builder.summary(
            self.run_id, self._device, int(stored), verification, self.end, resume=self._options.resume, earlier=earlier
        )

    def _train(
        self,
        control_log: ControlStream,
        telemetry: SpoolWriter,
        tail: Tail,
        membership: Membership,
        check_interrupt: Callable[[], None],
    ) -> None:
        options = self._options
        node = membership.connect(check_interrupt)
        before = self._takeover() if self._living else None
        ready = self._prepare(membership, check_interrupt)
        try:
            placement = place(options, ready.gpus, ready.gpu_models)
        except OptionsError as error:
            raise RunError(str(error)) from error
        self._device = placement.device
        if before is None:
            decided_by = AdaptationOptions(policy=options.policy)
            state = ControllerState.begin(Adaptation.begin(_site(options, placement), decided_by), options.mode)
            control_log.add(_started(self.run_id, options, placement))
            self._entries(tail.poll())
        else:
            state = before.state
            tail.only_after(before.entries)
            self._entries(before.entries)
        controller = Controller(
            options,
            control_log=control_log,
            telemetry=telemetry,
            tail=tail,
            inbox=Inbox(self._store, self.run_id),
            membership=membership,
            checkpoints=CheckpointKeeper(self._store, self.run_id, options.n_layers, before=options.resume),
            state=state,
            rank_spec=lambda rank: self._rank_spec(rank, node, placement, membership.folder),
            node=node,
            on_entries=self._entries,
            check_interrupt=check_interrupt,
            before=before,
        )
        controller.run()

    def _takeover(self) -> Takeover:
        try:
            with open_store(self._store) as reader:
                return taken_over(reader, self.run_id)
        except ReplayError as error:
            raise RunError(f"a new controller cannot go on from the log: {error}") from error

    def _prepare(self, membership: Membership, check_interrupt: Callable[[], None]) -> Ready:
        if not self._living:
            self._send_prepare(membership)
        until = time.monotonic() + _PREPARE_S
        while time.monotonic() < until:
            messages = membership.poll(0.1)
            for number, message in enumerate(messages):
                if isinstance(message, Ready):
                    if message.problem:
                        raise RunError(message.problem)
                    membership.put_back(messages[number + 1 :])
                    return message
            check_interrupt()
            self._on_tick()
        raise RunError(f"the node was not ready within {_PREPARE_S:.0f} s")

    def _send_prepare(self, membership: Membership) -> None:
        prepare = Prepare(run=self.run_id, store=str(self._store.root), options=self._options, ahead_us=membership.ahead_us)
        membership.send(msgspec.structs.replace(prepare, at_us=time.time_ns() // 1000))

    def _rank_spec(self, rank: int, node: str, placement: Placement, folder: Path) -> RankSpec:
        return RankSpec(
            rank=rank,
            device_id=f"{node}:{rank}",
            device_class=placement.classes[rank] if rank < len(placement.classes) else placement.classes[0],
            run=self.run_id,
            writer=writer_of(rank),
            store=str(self._store.root),
            options=self._options,
            device=placement.device,
            gpu=placement.gpu_of(rank),
            agent_folder=str(folder),
        )

    def _read_all(self, tail: Tail) -> None:
        """Everything that the spools hold by now, however much it is."""
        self._entries(tail.poll())
        while tail.behind:
            self._entries(tail.poll())

    def _entries(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.builder.take(entry)
            self._on_event(entry)
        self._on_tick()


def _started(run_id: str, options: RunOptions, placement: Placement) -> RunStarted:
    return RunStarted(
        run=run_id,
        device=placement.why,
        device_kind=placement.kind,
        clock="virtual" if placement.device == "virtual" else "monotonic",
        mode=options.mode,
        ranks=options.ranks,
        options=msgspec.to_builtins(options),
        resumed_from=options.resume.run if options.resume is not None else None,
        first_iteration=options.first_iteration,
        code=code_hash(),
        version=version("unskew"),
        policy=options.policy,
        detector=options.detector,
    )


def _log_end(control_log: ControlStream, end: RunFinished) -> RunFinished:
    """Log how the run ended. Where the log cannot be written any more that must not hide it: what is to be reported then."""
    try:
        control_log.add(end)
    except StoreError as error:
        status = "incomplete" if end.status == "done" else end.status
        unlogged = "the end of the run is not in the log"
        reason = f"{end.reason}; {unlogged} either" if end.reason else f"{unlogged}: {error}"
        return msgspec.structs.replace(end, status=status, reason=reason)
    return end


def _site(options: RunOptions, placement: Placement) -> Site:
    by_replica = options.recovery == FT_HSDP
    site = Site(
        origin=options.first_plan(),
        iterations=options.iterations,
        first_iteration=options.first_iteration,
        layer_bytes=() if by_replica else _layer_bytes(options),
        bytes_per_us=_BYTES_PER_US,
        regroup_us=_REGROUP_US,
        shared_cores=cores() if placement.kind == "cores" and options.ranks > cores() else None,
        truth_known=placement.device != "real",
        detector=msgspec.structs.replace(
            options_for(placement.kind, links=placement.device != "real"), method=options.detector
        ),
        blocking_sends=options.sends == "blocking",
        sync=sync_of(options),
        layer_sums=options.layer_sums or options.size.layer_sums,
        memory=memory_of(options),
        tokens=options.tokens,
        classes={
            name: tuple(rank for rank, own in enumerate(placement.classes) if own == name)
            for name in sorted({*placement.classes})
        },
        respawns=options.respawns,
        most_ranks=options.ranks if by_replica else placement.most_ranks,
        by_replica=by_replica,
        units=options.heads if options.model is None else options.units,
        room_bytes=None if placement.rank_bytes is None else _room_bytes(placement.rank_bytes),
    )
    try:
        return msgspec.structs.replace(site, origin=site.fitted(site.origin))
    except PlanError as error:
        raise RunError(f"the run cannot begin: {error}") from error


def _room_bytes(rank_bytes: int) -> float:
    """For how much a rank has room beside what an allocator wastes."""
    return rank_bytes * constant("memory_share")


def check_room(options: RunOptions) -> None:
    """Raises `OptionsError` where a rank's memory, as asked, does not hold what it needs under the first plan."""
    if not options.rank_mib:
        return
    room = Room(memory=memory_of(options), tokens=options.tokens, rank_bytes=_room_bytes(options.rank_mib * 2**20))
    try:
        room.fitted(options.first_plan())
    except PlanError as error:
        least = math.ceil(room.least_bytes(options.first_plan()) / _room_bytes(2**20))
        raise OptionsError(f"--rank-mib {options.rank_mib}: {error}, allowed: {least} or more") from error


def _layer_bytes(options: RunOptions) -> tuple[int, ...]:
    """What moves with each layer."""
    per_element = _MOVED * element_bytes(options)
    return tuple(per_element * count for count in parameters_of(options))


def _compare(one: Mapping[int, float], other: Mapping[int, float]) -> Verification:
    """The largest difference over all iterations; not a number when one run lacks an iteration or a loss is not a number."""
    if one.keys() != other.keys():
        return Verification(max_abs_loss_difference=math.nan)
    differences = [abs(loss - other[iteration]) for iteration, loss in one.items()]
    return Verification(
        max_abs_loss_difference=math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)
    )
