"""A rank: iterate, commit, change plan, recover, stand by.

The main thread runs this; side threads (control_thread.py) send its heartbeats and bring plan records. Any broken
communication leads to one place, `_recover`: stop the groups, wait for the record that names the survivors, regroup in the
same process, settle, go on. A rank without a role is on standby: a living process outside the groups and the vote, measured
when asked, until a plan gives it a role again. One that is started beside the run begins there.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from unskew.analytics.core.plan import Plan
from unskew.analytics.health.probing import Probe
from unskew.analytics.scheduler.kept import nothing_kept
from unskew.analytics.shards.parts import Part
from unskew.collector.events import Fault, IterationCommitted
from unskew.collector.files.checkpoints import Checkpoint, checkpoint_at
from unskew.collector.paths import Store
from unskew.collector.process_log import report
from unskew.collector.rights import take_rights_of
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.data import Data
from unskew.runtime.heartbeat_page import HeartbeatPage
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.model.own_model import model_of
from unskew.runtime.protocol import (
    CommunicationBroken,
    FaultAnnounced,
    MeasureStandby,
    PlanEntered,
    PlanRecord,
    RankFailed,
    RankFinished,
    RankSpec,
    StandbyProduct,
)
from unskew.runtime.rank.attempt import AttemptMeans
from unskew.runtime.rank.checkpoint import CheckpointWriter, UnreadableCheckpoint, restore, to_write
from unskew.runtime.rank.comm import Comm, PeerLost, arrive
from unskew.runtime.rank.commit import CommitOutcome, CommitStanding, RankState, Vote, decide, decoded, encoded, vote
from unskew.runtime.rank.control_thread import ControlThread
from unskew.runtime.rank.device import make_device
from unskew.runtime.rank.gradients import keep_gradients, loss_of
from unskew.runtime.rank.injection import Injector
from unskew.runtime.rank.migrate import LayersLost, copies_of, settle_in
from unskew.runtime.rank.probe import product_us, run_probe
from unskew.runtime.rank.progress import RankProgress
from unskew.runtime.rank.recorder import Recorder


def run_rank(rank_spec: RankSpec, corpus: Data, page: HeartbeatPage, kind: type[Rank] | None = None) -> None:
    """The life of a rank process, of another `kind` where one is given; returns when the run is done."""
    torch.set_num_threads(1)
    take_rights_of(Path(rank_spec.store))  # torch makes a checkpoint's files
    progress = RankProgress()
    spool = SpoolWriter(Store(Path(rank_spec.store)), rank_spec.run, rank_spec.writer)
    control = ControlThread(rank_spec, progress, page, spool.close)
    rank = (kind or Rank)(rank_spec, corpus, control, progress, spool)
    try:
        rank.run()
    except Exception as error:
        report(traceback.format_exc())
        detail, fatal = f"{type(error).__name__}: {error}", isinstance(error, LayersLost | UnreadableCheckpoint)
        control.send(RankFailed(rank=rank_spec.rank, plan_version=rank.plan.plan_version, detail=detail, fatal=fatal))
        raise
    finally:
        spool.close()


PROBE_S = 10.0
"""For so long nobody is called hung in a probe, nor while the last lines are written."""
LAST_CHECKPOINT_S = 8.0
"""A rank that is through waits so long for its part of the last checkpoint."""
LAST_LINES_S = 1.0
"""A rank that is through waits so long for the disk before it reports what that has not taken."""


class Rank:
    """The state of one rank: its layers, its place in the plan, and how far it has come."""

    def __init__(
        self, rank_spec: RankSpec, corpus: Data, control: ControlThread, progress: RankProgress, spool: SpoolWriter
    ) -> None:
        options = rank_spec.options
        self.rank_spec, self.options, self.corpus = rank_spec, options, corpus
        self.control, self.progress, self.spool = control, progress, spool
        self.device = make_device(rank_spec)
        joins = rank_spec.joins
        # What was to happen by now has happened, to the process before.
        due = [fault for fault in options.faults if joins is None or fault.at_iteration >= joins.committed]
        self.injector = Injector(due, rank_spec.rank, options.seed, self._announce)
        self.recorder = Recorder(spool, self.device, rank_spec)
        self.size = model_of(options)
        self.dtype: torch.dtype = getattr(torch, options.stored)
        layer_bytes = [self.dtype.itemsize * self.size.parameters(number) for number in range(self.size.n_layers)]
        self.attempts = AttemptMeans(
            options, rank_spec.rank, device=self.device, progress=progress, recorder=self.recorder, injector=self.injector,
            layer_bytes=layer_bytes,
        )  # fmt: skip
        self.layers: dict[int, HeldLayer] = {}
        # What it had of layers of which it has another part now: kept, like what is moved away, until a commit seals that.
        self.before: dict[int, list[HeldLayer]] = {}
        self.plan = options.first_plan() if joins is None else joins.plan
        self.kept = nothing_kept(self.plan)
        self.comm: Comm | None = None
        log = Store(Path(rank_spec.store))
        self.origin: Checkpoint | None = None
        if options.resume is not None:
            self.origin = checkpoint_at(log, options.resume.run, options.resume.iterations)
        self.writer: CheckpointWriter | None = None
        if options.checkpoint_every:
            self.writer = CheckpointWriter(log.checkpoints(rank_spec.run), rank_spec.rank, control.send)
        # Iterations stepped; the highest attempt at the next one that anybody is known to have begun; the last barrier passed.
        self.stepped, self.attempt = options.first_iteration, -1
        self.outcome: CommitOutcome | None = None
        self.batch: Batch | None = None
        self.begun_us = self.voted_us = 0

    def run(self) -> None:
        if self.rank_spec.joins is None:
            self._recover(after=-1)
            # What a later probe is compared with: this device's own product while it is taken for healthy.
            self._probe(Probe(ranks=(self.rank_spec.rank,)))
        while True:
            try:
                if self.on_standby:
                    self._be_on_standby()
                elif self.stepped < self.options.iterations:
                    self._iterate()
                else:
                    self.control.send(self._finished())
                    self._recover(after=self.plan.plan_version)
            except PeerLost as lost:
                plan_version = self._connected().plan_version
                report(f"rank {self.rank_spec.rank}: plan {plan_version} broke in iteration {self.stepped}: {lost}")
                self.control.send(CommunicationBroken(rank=self.rank_spec.rank, plan_version=plan_version, detail=str(lost)))
                self._recover(after=plan_version)

    def _finished(self) -> RankFinished:
        """That all is committed, and what of it is in the log; the last checkpoint comes before it."""
        with self.progress.promising(PROBE_S):
            if self.writer is not None:
                self.writer.finish(LAST_CHECKPOINT_S)
            self.spool.hand_over(LAST_LINES_S)
        return RankFinished(
            rank=self.rank_spec.rank, committed=self.stepped, unwritten=self.spool.unwritten, problem=self.spool.problem
        )

    @property
    def on_standby(self) -> bool:
        """Whether the plan it acts on has no role for it."""
        return self.rank_spec.rank not in self.plan.role_of

    def _be_on_standby(self) -> None:
        """Wait to be measured, or for a change of plan that gives this rank a part."""
        with self.progress.waiting("standby"):
            order = self.control.wait_on_standby(self.plan.plan_version)
        if isinstance(order, PlanRecord):
            self._change_plan(order)
        else:
            self._measure(order)

    def _measure(self, order: MeasureStandby) -> None:
        """This device's matrix product, of a rank that executes nothing: nobody waits for it."""
        if self.on_standby:
            # A plan without this rank has committed: nobody will ask for its copies any more.
            self.layers, self.before = {}, {}
        self.progress.iteration = order.iteration
        self.recorder.begin(self.plan, order.iteration, 0)
        self.injector.on_standby(order.iteration)
        with self.progress.promising(PROBE_S):
            us = product_us(Probe(ranks=()).repeats, order.iteration, self.device, self.recorder)
        self.control.send(StandbyProduct(rank=self.rank_spec.rank, iteration=order.iteration, product_us=us))
        self.spool.flush_soon()

    def _iterate(self) -> None:
        """One attempt at iteration `stepped`, its commit, and the change of plan when the vote calls for one."""
        comm = self._connected()
        self.control.keep_pace(self.stepped, self.plan.plan_version)
        iteration, self.attempt = self.stepped, self.attempt + 1
        if self.rank_spec.rank not in self.plan.executors and (order := self.control.order()) is not None:
            self._measure(order)
        self.progress.iteration = iteration
        self.injector.begin(iteration)
        self.recorder.begin(self.plan, iteration, self.attempt)
        self.begun_us = self.device.now_us()
        batch = self.batch = Batch(self.corpus, self.options, iteration)
        of = self.attempts.of(self.plan, self.kept, self.layers)
        sums = of.execute(batch, comm, overlapped=True)
        complete = self.recorder.hand_over()  # first: once they are in a sum, chunks count also when their rank dies
        of.reduce(sums, comm)
        self.injector.at(iteration, "before_barrier")
        self.voted_us = self.device.now_us()
        mine = Vote(
            loss=loss_of(self.plan, self.layers, self.rank_spec.rank),
            highest_plan_version=max(self.control.highest_boundary, self.plan.plan_version),
            log_complete=complete,
            clock_us=self.device.now_us(),
        )
        with self.progress.waiting("commit"):
            self.outcome = vote(comm, iteration, self.attempt, mine)
        self.injector.at(iteration, "before_step")
        self._step(self.outcome)
        if self.outcome.next_plan_version > self.plan.plan_version and self.stepped < self.options.iterations:
            self._change_plan(self.control.record(self.outcome.next_plan_version))

    def _step(self, outcome: CommitOutcome, *, settled: bool = False) -> None:
        """Commit iteration `outcome.iteration` on this rank and log it; `settled` = after an abort, later than it
        ended."""
        self.device.advance_to(outcome.clock_us)
        start_us = self.device.now_us()
        role = self.plan.role_of[self.rank_spec.rank]
        for number in role.layers:
            self.layers[number].step()
        self.recorder.optimizer(start_us)
        # What the plan moved away is dropped only now: the first iteration without it is committed.
        self.layers = {number: layer for number, layer in self.layers.items() if role.holds(number, 1)}
        self.before = {}
        self.stepped, self.attempt, self.kept = outcome.iteration + 1, -1, nothing_kept(self.plan)
        self._save()
        committed = IterationCommitted(
            iteration=outcome.iteration, plan_version=outcome.plan_version, attempt=outcome.attempt, rank=self.rank_spec.rank,
            loss=outcome.loss, tokens=self.batch.target_tokens if self.batch is not None else 0, start_us=self.begun_us,
            wall_us=(self.voted_us if settled else self.device.now_us()) - self.begun_us, log_complete=outcome.log_complete,
            cpu_us=self.recorder.cpu_us, forward_own_us=self.recorder.own("F"), backward_own_us=self.recorder.own("B"),
        )  # fmt: skip
        self.spool.append(committed)
        self.spool.flush_soon()

    def _save(self) -> None:
        """Begin a checkpoint, where one is due."""
        due = self.stepped == self.options.iterations or self.stepped % max(self.options.checkpoint_every, 1) == 0
        if self.writer is not None and due:
            self.writer.save(self.stepped, self.layers, to_write(self.plan, self.rank_spec.rank))

    def _change_plan(self, record: PlanRecord) -> None:
        """A change that nobody's death asked for: new groups, layers move; then what is to be measured."""
        with self.progress.waiting("regroup"):
            self._enter(record)
        if record.probe is not None:
            self._probe(record.probe)

    def _probe(self, probe: Probe) -> None:
        with self.progress.promising(PROBE_S):
            run_probe(
                probe, self.rank_spec.rank, self.stepped, device=self.device, comm=self._connected(), recorder=self.recorder
            )

    def _recover(self, after: int) -> None:
        """Groups are broken (or not there yet): wait for the record that names who is left, and settle with them.

        One that has no part for this rank ends its coming back: it stays on standby.
        """
        if self.comm is not None:
            self.comm.stop()
        with self.progress.waiting("regroup"):
            while True:
                record = self.control.wait_for_abort(after)
                after = record.plan.plan_version
                if not record.names(self.rank_spec.rank):
                    # Others have gone on without it: nobody asks for what it holds.
                    self.plan, self.layers, self.before = record.plan, {}, {}
                    self.kept, self.attempt = nothing_kept(record.plan), -1
                    return
                try:
                    self._enter(record)
                except PeerLost as lost:
                    report(f"rank {self.rank_spec.rank}: plan {after} broke while regrouping: {lost}")
                    self._connected().stop()
                    self.control.send(CommunicationBroken(rank=self.rank_spec.rank, plan_version=after, detail=str(lost)))
                else:
                    return

    def _enter(self, record: PlanRecord) -> None:
        """Meet, settle, move layers, act on the plan: every plan begins here. Raises `PeerLost`.

        Where ranks leave, groups of all ranks of both plans come first. Who leaves then only reports that it is through with
        these: until all have, nobody closes them, for a closed socket would be taken for a loss.
        """
        plan, leaving = record.plan, record.leaving
        start_us, began_ns, waited = self.device.now_us(), time.monotonic_ns(), self.on_standby
        groups = [*plan.teams, *(ranks for ranks, _ in plan.gradient_groups)]
        team = plan.team_of.get(self.rank_spec.rank, ())
        if leaving:
            members = sorted({*plan.ranks, *leaving})
            comm = Comm(self.control, plan.plan_version, self.rank_spec.rank, members, (), phase="/handover")
        else:
            comm = Comm(self.control, plan.plan_version, self.rank_spec.rank, plan.ranks, groups, team=team)
        heard = decoded(self._connect(comm, self._stated()))
        if waited:  # for the others to come to the boundary: that is no part of what the change costs
            start_us, began_ns = self.device.now_us(), time.monotonic_ns()
        states = self._settle(heard)
        self.recorder.regroup(plan, self.stepped, start_us)
        started = time.monotonic()
        received = self._migrate(plan, states)
        migrate_s = time.monotonic() - started
        if record.abort:
            held = {rank: states[rank].sums(role, self.stepped) for rank, role in plan.role_of.items()}
            self.kept = keep_gradients(plan, self.layers, comm, held if self.options.recovery == "in-step" else None)
        if self.rank_spec.rank in leaving:
            arrive(self.control, plan.plan_version, self.rank_spec.rank)
            return
        if leaving:
            start_us = self.device.now_us()
            comm = Comm(
                self.control, plan.plan_version, self.rank_spec.rank, plan.ranks, groups, team=team, awaited=leaving
            )  # fmt: skip
            self._connect(comm)
            self.recorder.regroup(plan, self.stepped, start_us)
        self.control.send(
            PlanEntered(
                rank=self.rank_spec.rank,
                plan_version=plan.plan_version,
                iteration=self.stepped,
                began_ns=began_ns,
                at_ns=time.monotonic_ns(),
                migrate_s=migrate_s,
                moved_bytes=received,
                kept=self.kept.share if record.abort and self.attempt >= 0 else None,
            )
        )

    def _connect(self, comm: Comm, stated: bytes = b"") -> dict[int, bytes]:
        """Go over to other groups; what each member has stated where they met."""
        before, self.comm = self.comm, comm
        self.control.use(comm)
        try:
            return comm.build(stated)
        finally:
            # Only now: a member that is still reading the old groups' last vote would take a closed socket for a loss.
            if before is not None and before.built:
                before.drop()

    def _stated(self) -> bytes:
        standing = CommitStanding(stepped=self.stepped, attempt=self.attempt, outcome=self.outcome)
        return encoded(standing, copies_of(self.layers, self.before))

    def _settle(self, heard: Mapping[int, RankState]) -> Mapping[int, RankState]:
        """Agree on what is committed; what others have committed without a rank on standby it takes as done. What each holds
        then."""
        settled = decide([state.standing for state in heard.values()])
        if self.stepped < settled.committed and settled.outcome is not None:
            self.outcome = settled.outcome
            if self.on_standby:
                self.stepped = settled.committed
                self.device.advance_to(settled.outcome.clock_us)
            else:
                self._step(settled.outcome, settled=True)
        self.attempt = settled.attempt - 1
        if all(state.standing.stepped == settled.committed for state in heard.values()):
            return heard
        return decoded(self._connected().state_again(self._stated()))

    def _migrate(self, plan: Plan, states: Mapping[int, RankState]) -> int:
        """Bring what the plan asks this rank to hold, then act on the plan; the bytes that came.
        A rank that leaves keeps its copies: a death before the plan is in force brings the old one back.
        """
        comm = self._connected()
        start_us = self.device.now_us()
        begins = self.stepped == self.options.first_iteration
        make = partial(self._layer, begins=begins)
        current = None if begins else {rank: state.parts(self.stepped) for rank, state in states.items()}
        received = settle_in(comm, plan, self.layers, self.before, make, current=current, committed=self.stepped)
        self.plan = plan
        self.recorder.migrate(plan, self.stepped, start_us, received)
        return received

    def _layer(self, number: int, part: Part | None, *, begins: bool) -> HeldLayer:
        """A part of a layer: where the run `begins` of its checkpoint or from the seed, else a place to be filled."""
        make = partial(HeldLayer, self.size, number, dtype=self.dtype, device=self.device.torch_device)
        if begins and self.origin is not None:
            return restore(self.origin, number, part, partial(make, seed=None))
        return make(part=part, seed=self.options.seed if begins else None)

    def _announce(self, fault: Fault, iteration: int) -> None:
        self.control.send(FaultAnnounced(fault=fault, iteration=iteration, at_us=time.time_ns() // 1000))

    def _connected(self) -> Comm:
        if self.comm is None:
            raise PeerLost("no groups yet")
        return self.comm
