"""A rank by the rules of FT-HSDP (arXiv 2602.00277): its replica steps together or not at all, whatever the others do.

Within a replica ranks are connected as ever (rank/comm.py); nothing of another replica's death is seen there. Between replicas
only ranks with the same layers talk, in a ring that is made anew around a loss (ring.py). One step:

1. quorum: the replica's first rank has proposed this step while it computed the one before, and hands the answer to the others;
2. a healthy replica computes its own batch; one that is behind computes nothing and fetches the state meanwhile (catch_up.py);
3. the gradients are summed in the ring, where who is behind adds zeros;
4. commit: every rank of the replica reports whether its exchange is through, and its state there. All: they step; else they
   drop the gradients, and the replica does the step again, or finds itself behind.

When a rank of the own replica dies, the replica is out: its processes stand by until it is whole again and behind.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter

import torch

from unskew.analytics.scheduler.kept import nothing_kept
from unskew.analytics.scheduler.quorum import Quorum
from unskew.analytics.scheduler.replicas import micro_batches_of, trained
from unskew.collector.events import ReplicaStep, ReplicaStepState
from unskew.collector.process_log import report
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.data import Data
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.protocol import CommunicationBroken, PlanEntered, PlanRecord, QuorumProposal, RankSpec
from unskew.runtime.rank.comm import Comm, PeerLost
from unskew.runtime.rank.commit import CommitOutcome
from unskew.runtime.rank.control_thread import ControlThread
from unskew.runtime.rank.progress import RankProgress
from unskew.runtime.rank.rank import Rank
from unskew.runtime.replicas.batches import batch_of
from unskew.runtime.replicas.catch_up import ReplicaState, StateFetch, StateSource
from unskew.runtime.replicas.ring import Ring, RingLinks

_QUORUM_TAG = 2**31 - 1
"""No chunk's message has it."""
_COPY_S = 30.0
"""So long who asks for a state waits until its iteration begins."""
_LOOK_S = 0.05


class ReplicaRank(Rank):
    """`stepped` counts what this rank's state holds; `_current` means that all of its replica hold the same of it."""

    def __init__(
        self, rank_spec: RankSpec, corpus: Data, control: ControlThread, progress: RankProgress, spool: SpoolWriter
    ) -> None:
        super().__init__(rank_spec, corpus, control, progress, spool)
        first = self.options.first_plan()
        role = first.role_of[rank_spec.rank]
        self._replica, self._stage = role.replica, role.stage
        self._shares = micro_batches_of(first)
        held = self.options.resume.positions if self.options.resume is not None else ()
        self._positions = held or (self.options.first_iteration,) * self.options.dp
        self._current = rank_spec.joins is None
        self._stepping = threading.Condition()
        self._links = RingLinks(rank_spec.agent_folder, rank_spec.rank)
        StateSource(rank_spec.agent_folder, rank_spec.rank, self._copy)
        # The plan version with which the replica came together; the last quorum acted on, and what the next one must exceed;
        # the newest plan version under which a step was proposed, and the newest that the controller knows to be entered.
        self._together = -1
        self._acted = (-1, -1)
        self._least = self._proposed = self._entered = -1
        self._tries: Counter[int] = Counter()
        self._reported = -1

    def run(self) -> None:
        record = self.control.wait_for_abort(-1) if self.rank_spec.joins is None else None
        while True:
            try:
                if record is not None:
                    joining, record = record, None
                    self._come_together(joining)
                if self.on_standby:
                    record = self._stand_by()
                else:
                    self._take_step()
            except PeerLost as lost:
                record = self._broken(lost)

    # --- the replica as a whole --------------------------------------------------------------------------------------

    def _stand_by(self) -> PlanRecord | None:
        """Until the replica is whole again: then the record of the plan that it returns with."""
        with self.progress.waiting("standby"):
            order = self.control.wait_on_standby(self.plan.plan_version)
        if isinstance(order, PlanRecord):
            return order
        self._measure(order)
        return None

    def _broken(self, lost: PeerLost) -> PlanRecord | None:
        """The replica fell apart: the newest record that names this rank since it came together; None puts it on standby."""
        report(f"rank {self.rank_spec.rank}: replica {self._replica} broke at iteration {self.stepped}: {lost}")
        self._links.leave()
        if self.comm is not None:
            self.comm.drop()
        version = max(self._together, self.plan.plan_version)
        self.control.send(CommunicationBroken(rank=self.rank_spec.rank, plan_version=version, detail=str(lost)))
        with self.progress.waiting("regroup"):
            record = self.control.wait_for_abort(self._together)
        if record.names(self.rank_spec.rank):
            return record
        self.plan, self.comm, self._current = record.plan, None, False
        return None

    def _come_together(self, record: PlanRecord) -> None:
        """Connect the ranks of this replica, and find out whether they hold one state. Raises `PeerLost`."""
        plan, rank = record.plan, self.rank_spec.rank
        self._together = plan.plan_version
        self._acted = plan.plan_version, -1
        self._members = tuple(role.rank for role in plan.roles if role.replica == self._replica)
        comm = Comm(self.control, plan.plan_version, rank, self._members, (), phase=f"/replica{self._replica}")
        with self.progress.waiting("regroup"):
            self._connect(comm)
        self.control.keep(comm)
        self.plan = plan
        for number in plan.role_of[rank].layers:
            if number not in self.layers:
                self.layers[number] = self._new_layer(number)
            self.layers[number].clear_gradients()
        standing = [self.stepped, self._current, *self._positions]
        rows = comm.all_gather(torch.tensor(standing, dtype=torch.int64)).tolist()
        self._current = all(row == rows[0] for row in rows) and bool(rows[0][1])
        self._propose(plan.plan_version, self.stepped, ahead=False)

    def _new_layer(self, number: int) -> HeldLayer:
        return self._layer(number, None, begins=True)

    # --- quorum ------------------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self.rank_spec.rank == self._members[0]

    def _propose(self, plan_version: int, iteration: int, *, ahead: bool) -> None:
        self._proposed = plan_version
        if self._leads:
            current = self._current and (not ahead or self.stepped == iteration - 1)
            self.control.send(
                QuorumProposal(
                    rank=self.rank_spec.rank, replica=self._replica, plan_version=plan_version, iteration=iteration,
                    attempt=self._tries[iteration], current=current, ahead=ahead,
                )
            )  # fmt: skip

    def _agree(self) -> Quorum:
        """The next quorum, the same on all ranks of the replica: the first one waits for it. Raises `PeerLost`."""
        comm = self._connected()
        if not self._leads:
            with self.progress.waiting("recv", self._members[0]):
                row = comm.receive(torch.zeros(2, dtype=torch.int64), self._members[0], _QUORUM_TAG).wait()
                return self.control.quorum(int(row[0]), int(row[1]))
        with self.progress.waiting("commit"):
            while (quorum := self._next_quorum()) is None:
                pass
            row = torch.tensor(quorum.place, dtype=torch.int64)
            for pending in [comm.send(row, member, _QUORUM_TAG) for member in self._members[1:]]:
                pending.wait()
        return quorum

    def _next_quorum(self) -> Quorum | None:
        """Wait for it; None when a plan came meanwhile under which the step must be proposed anew."""
        abort = self.control.newest_abort
        if abort > self._proposed:
            if not self.control.record(abort).names(self.rank_spec.rank):
                raise PeerLost(f"plan {abort} goes on without the replica")
            self._propose(abort, self.stepped, ahead=False)
        return self.control.wait_for_quorum(self._acted, self._least, abort)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _take_step(self) -> None:
        """One attempt at the step of the next quorum."""
        asked_ns = time.monotonic_ns()
        quorum = self._agree()
        quorum_wait_us = (time.monotonic_ns() - asked_ns) // 1000
        plan, iteration = self.control.record(quorum.plan_version).plan, quorum.iteration
        self.plan, self._acted = plan, quorum.place
        self._enter_plan(iteration)
        holds, healthy = self._current and self.stepped == iteration, self._replica in quorum.healthy
        if holds and not quorum.behind and iteration > self.options.first_iteration:
            super()._save()  # only now: nobody can commit another update for the step before any more
        if iteration >= self.options.iterations:
            if not holds:
                self._fetch_the_end(quorum)
            if self._current and self.stepped > self._reported:
                self._reported = self.stepped
                self.control.send(self._finished())
            return
        self._propose(plan.plan_version, iteration + 1, ahead=True)
        self._tries = Counter({iteration: self._tries[iteration] + 1})
        fetch = None if holds else self._fetch(quorum)
        self._begin(quorum)
        if healthy:
            self.batch = self._batch(quorum)
            self.attempts.of(self.plan, self.kept, self.layers).execute(self.batch, self._connected())
        complete = self.recorder.hand_over()
        began_ns = time.monotonic_ns()
        ring = Ring(self._links, plan.plan_version, iteration, self.device.now_us())
        exchanged = self._exchange(ring)
        exchange_us = (time.monotonic_ns() - began_ns) // 1000
        state = fetch.state if fetch is not None else None
        outcome = self._vote(ring, exchanged=exchanged, ready=holds or state is not None, complete=complete)
        if outcome is not None:
            self._commit(outcome, quorum, state)
        else:
            self._drop(holds=holds, exchanged=exchanged)
        if fetch is not None:
            fetch.give_up()
        batch = self.batch if healthy or outcome is not None else None
        committed = outcome is not None
        self.spool.append(
            ReplicaStep(
                iteration=iteration,
                plan_version=plan.plan_version,
                attempt=quorum.attempt,
                rank=self.rank_spec.rank,
                replica=self._replica,
                state=_state_of(healthy=healthy, holds=holds, committed=committed),
                exchanged=exchanged,
                committed=committed,
                position=self._positions[self._replica] - (committed and healthy),
                tokens=self._own_tokens(batch) if batch is not None and healthy else 0,
                divisor=batch.target_tokens if batch is not None else 0,
                healthy=len(quorum.healthy),
                source=fetch.source if fetch is not None else None,
                fetched_bytes=state.bytes if state is not None else 0,
                fetch_us=fetch.took_us if fetch is not None else 0,
                quorum_wait_us=quorum_wait_us,
                exchange_us=exchange_us,
                digest=self._digest() if committed and (quorum.behind or self.stepped == self.options.iterations) else "",
            )
        )
        self.spool.flush_soon()

    def _save(self) -> None:
        """Not with the commit: one that no other replica makes may be undone."""

    def _begin(self, quorum: Quorum) -> None:
        self.attempt, self.kept = quorum.attempt, nothing_kept(self.plan)
        self.progress.iteration = quorum.iteration
        self.injector.begin(quorum.iteration)
        self.recorder.begin(self.plan, quorum.iteration, self.attempt)
        self.begun_us = self.device.now_us()

    def _enter_plan(self, iteration: int) -> None:
        """Report that this rank acts on the plan, once."""
        version, at_ns = self.plan.plan_version, time.monotonic_ns()
        if version > self._entered:
            self._entered = version
            self.control.send(
                PlanEntered(
                    rank=self.rank_spec.rank, plan_version=version, iteration=iteration, began_ns=at_ns, at_ns=at_ns,
                    migrate_s=0.0, moved_bytes=0,
                )
            )  # fmt: skip

    def _own_tokens(self, batch: Batch) -> int:
        return sum(batch.tokens(route.micro_batch) for route in self.plan.routes if route.replica == self._replica)

    def _batch(self, quorum: Quorum) -> Batch:
        return batch_of(
            self.corpus, self.options, quorum.iteration, plan=self.plan, shares=self._shares, positions=self._positions,
            healthy=quorum.healthy,
        )  # fmt: skip

    def _exchange(self, ring: Ring) -> bool:
        """Sum the gradients over the replicas; whether that went through on this rank."""
        self.control.use(ring)
        try:
            sums = self.attempts.of(self.plan, self.kept, self.layers).sums(ring)
            sums.finish()
        except PeerLost as lost:
            report(f"rank {self.rank_spec.rank}: the exchange of iteration {self.progress.iteration} broke: {lost}")
            return False
        finally:
            self.control.release(ring)
        self.recorder.add(*sums.spans())
        return True

    def _vote(self, ring: Ring, *, exchanged: bool, ready: bool, complete: bool) -> CommitOutcome | None:
        """What the replica commits; None when one of its ranks has no sum, or no state. Raises `PeerLost`."""
        iteration, plan_version = self.progress.iteration, self.plan.plan_version
        self.injector.at(iteration, "before_barrier")
        self.voted_us = self.device.now_us()
        clock_us = max(ring.clock_us, self.device.now_us())
        mine = [exchanged and ready, self._loss() if exchanged else 0.0, complete, clock_us]
        with self.progress.waiting("commit"):
            rows = self._connected().all_gather(torch.tensor(mine, dtype=torch.float64))
        self.injector.at(iteration, "before_step")
        if not bool(rows[:, 0].min()):
            return None
        return CommitOutcome(
            iteration=iteration,
            plan_version=plan_version,
            attempt=self.attempt,
            loss=float(rows[:, 1].sum()),
            next_plan_version=plan_version,
            log_complete=bool(rows[:, 2].min()),
            clock_us=int(rows[:, 3].max()),
        )

    def _commit(self, outcome: CommitOutcome, quorum: Quorum, state: ReplicaState | None) -> None:
        with self._stepping:
            if state is not None:
                self._take_over(state)
            if self._replica not in quorum.healthy:
                self.batch = self._batch(quorum)
            self._step(outcome)
            self._positions = trained(self._positions, quorum.healthy)
            self._stepping.notify_all()

    def _loss(self) -> float:
        """The step's loss, from the rank of this replica that has the last layer."""
        last = self.plan.n_layers - 1
        return sum(self.layers[last].losses.values()) if last in self.plan.role_of[self.rank_spec.rank].layers else 0.0

    def _drop(self, *, holds: bool, exchanged: bool) -> None:
        """The step is not committed on this replica: what was summed for it goes."""
        for layer in self.layers.values():
            layer.clear_gradients()
        if holds:
            self._least = self.plan.plan_version + 1  # without one that is issued at once nothing would be different
        if not exchanged:
            version = self.plan.plan_version
            self.control.send(CommunicationBroken(rank=self.rank_spec.rank, plan_version=version, detail="the ring broke"))

    # --- catch-up ----------------------------------------------------------------------------------------------------

    def _copy(self, iterations: int) -> ReplicaState | None:
        """For a rank that is behind: called from another thread."""
        with self._stepping:
            self._stepping.wait_for(lambda: self.stepped >= iterations, _COPY_S)
            if self.stepped != iterations or not self._current:
                return None
            layers = {number: layer.pack().to("cpu") for number, layer in self.layers.items()}
            return ReplicaState(iterations, self._positions, layers)

    def _fetch(self, quorum: Quorum) -> StateFetch:
        replica = quorum.sources[self._replica]
        source = next(role.rank for role in self.plan.roles if (role.replica, role.stage) == (replica, self._stage))
        return StateFetch(self.rank_spec.agent_folder, source, quorum.iteration, self.dtype)

    def _take_over(self, state: ReplicaState) -> None:
        """Become what the source was; the gradients that came meanwhile stay."""
        for number, flat in state.layers.items():
            layer = self.layers[number]
            gradients, summed = layer.pack_sum(len(self.plan.routes)), dict(layer.summed)
            layer.unpack(flat)
            layer.stepped(state.iterations)
            layer.unpack_sum(gradients, summed)
        self.stepped, self._positions, self._current = state.iterations, state.positions, True

    def _fetch_the_end(self, quorum: Quorum) -> None:
        """The others are through, the state is all that is left to take: until it is here, or a plan comes."""
        comm, over = self._connected(), False
        while not over:
            fetch = self._fetch(quorum)
            with self.progress.waiting("recv", fetch.source):
                while not fetch.wait(_LOOK_S) and self.control.newest_abort <= self.plan.plan_version:
                    pass
                fetch.give_up()
                here = fetch.state is not None, self.control.newest_abort <= self.plan.plan_version
                rows = comm.all_gather(torch.tensor(here, dtype=torch.int64))
            over = bool(rows[:, 0].min()) or not bool(rows[:, 1].min())
            if bool(rows[:, 0].min()) and fetch.state is not None:
                with self._stepping:
                    self._take_over(fetch.state)
                    for layer in self.layers.values():
                        layer.clear_gradients()

    def _digest(self) -> str:
        """Of the state after the step, optimiser included: equal on ranks of one role that are equal bit by bit."""
        found = hashlib.blake2b(digest_size=8)
        for number in sorted(self.layers):
            found.update(self.layers[number].pack().to("cpu").numpy().tobytes())
        return found.hexdigest()


def _state_of(*, healthy: bool, holds: bool, committed: bool) -> ReplicaStepState:
    if healthy:
        return "healthy"
    if holds:
        return "zero_grad"
    return "rejoined" if committed else "fetching"
