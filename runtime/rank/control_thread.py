"""A rank's side threads: heartbeats for the agent; plan records from it, and what other ranks have published there.

A record that aborts frees the main thread at once, wherever it is blocked. When the agent is gone the rank ends itself: nothing
of a run outlives its agent.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import torch

from unskew.analytics.scheduler.quorum import Quorum
from unskew.runtime.channel import Channel
from unskew.runtime.heartbeat_page import BEAT_S, Beat, HeartbeatPage
from unskew.runtime.protocol import (
    AGENT_SOCKET,
    Await,
    Judged,
    MeasureStandby,
    Message,
    PlanRecord,
    Publish,
    Published,
    QuorumFound,
    RankSpec,
    Stop,
)
from unskew.runtime.rank.comm import PeerLost
from unskew.runtime.rank.progress import RankProgress

AHEAD, AHEAD_S = 4, 3.0
"""Virtual time takes none of the controller's: ranks on it are so many iterations ahead of what is judged, and wait so long for
it, so that what is decided does not depend on how busy the machine is."""
GPU_MEMORY_S = 1.0
"""So often torch is asked for the peak of a GPU's memory: each time it holds up, for a tenth of a millisecond, whoever launches
work."""
_QUORUMS = 64
"""So many of the newest are kept."""


class Stoppable(Protocol):
    """What a plan record can call off: the groups of a plan version, the exchange of a step."""

    plan_version: int

    def stop(self) -> None:
        """Free whoever is blocked in it."""


class ControlThread:
    """`last_words` hands over the rank's events before the process ends."""

    def __init__(
        self, rank_spec: RankSpec, progress: RankProgress, page: HeartbeatPage, last_words: Callable[[], object]
    ) -> None:
        self._rank_spec, self._progress, self._last_words = rank_spec, progress, last_words
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"{rank_spec.agent_folder}/{AGENT_SOCKET}")
        self._channel = Channel(sock)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._records: dict[int, PlanRecord] = {}
        self._measure: MeasureStandby | None = None
        self._published: Published | None = None
        self._comm: Stoppable | None = None
        self._kept: Stoppable | None = None
        self._quorums: dict[tuple[int, int], Quorum] = {}
        self._judged, self._in_vain = rank_spec.options.first_iteration, -1
        threading.Thread(target=self._beat, args=[page], name="heartbeat", daemon=True).start()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Tell the agent, from any thread; if it is gone, the listening thread is about to end the process."""
        try:
            with self._sending:
                self._channel.send(message)
        except OSError:
            time.sleep(60)

    @property
    def highest_boundary(self) -> int:
        """The highest plan version held that waits for a commit boundary; -1 when none."""
        with self._changed:
            return max((plan_version for plan_version, record in self._records.items() if not record.abort), default=-1)

    def record(self, plan_version: int) -> PlanRecord:
        """The record of a plan version that this rank holds."""
        with self._changed:
            return self._records[plan_version]

    def wait_for_abort(self, after: int) -> PlanRecord:
        """Block until there is a record above `after` that takes effect at once, and return the newest such."""
        with self._changed:
            while True:
                newest = max((plan_version for plan_version, record in self._records.items() if record.abort), default=-1)
                if newest > after:
                    return self._records[newest]
                self._changed.wait()

    def wait_on_standby(self, after: int) -> PlanRecord | MeasureStandby:
        """Block until this rank is to be measured, or until the newest record is above `after` and gives it a part.

        A record that a newer one has overtaken counts no more: its change was called off.
        """
        with self._changed:
            while True:
                newest = max(self._records, default=-1)
                if newest > after and self._records[newest].names(self._rank_spec.rank):
                    self._measure = None
                    return self._records[newest]
                if self._measure is not None:
                    order, self._measure = self._measure, None
                    return order
                self._changed.wait()

    def order(self) -> MeasureStandby | None:
        """What this rank was asked to measure and has not; without waiting."""
        with self._changed:
            order, self._measure = self._measure, None
            return order

    def keep_pace(self, iteration: int, plan_version: int) -> None:
        """On virtual time, block until the controller has judged what lies `AHEAD` before `iteration`, or a record aborts what
        `plan_version` does. Who has waited in vain, for want of a controller or a log, waits only after the next judgement."""
        if self._rank_spec.options.device != "virtual":
            return
        with self._progress.waiting("commit"), self._changed:
            if self._judged != self._in_vain and not self._changed.wait_for(
                lambda: self._judged >= iteration - AHEAD or self._superseded(plan_version), AHEAD_S
            ):
                self._in_vain = self._judged

    def publish(self, key: str, value: bytes) -> None:
        """Let the other ranks have `value`."""
        self.send(Publish(key=key, value=value))

    def fetch(self, keys: Sequence[str], plan_version: int) -> Sequence[bytes]:
        """Block until all of `keys` are published. Raises `PeerLost` once a later record aborts what `plan_version`
        does."""
        asked = Await(keys=tuple(keys))
        with self._changed:
            # Asked with the lock held: a thread of a plan that was called off would take the place of the question that another
            # asks for the next plan, for the agent answers the last one alone.
            if self._superseded(plan_version):
                raise PeerLost(f"plan {plan_version} was called off")
            self.send(asked)
            while self._published is None or self._published.keys != asked.keys:
                if self._superseded(plan_version):
                    raise PeerLost(f"plan {plan_version} was called off")
                self._changed.wait()
            answer, self._published = self._published, None
            return answer.values

    def _superseded(self, plan_version: int) -> bool:
        return any(record.abort and later > plan_version for later, record in self._records.items())

    def use(self, comm: Stoppable) -> None:
        """From now on a record that aborts stops `comm`; at once when a newer such record is already here."""
        with self._changed:
            self._comm = comm
            if self._superseded(comm.plan_version):
                comm.stop()

    def keep(self, comm: Stoppable) -> None:
        """From now on only a record that aborts and has no part for this rank stops `comm`."""
        with self._changed:
            self._kept = comm
            self.release(comm)
            if any(self._leaves_out(record) and later > comm.plan_version for later, record in self._records.items()):
                comm.stop()

    def release(self, comm: Stoppable) -> None:
        """It is over: no record concerns it any more."""
        with self._changed:
            if self._comm is comm:
                self._comm = None

    def _leaves_out(self, record: PlanRecord) -> bool:
        return record.abort and not record.names(self._rank_spec.rank)

    @property
    def newest_abort(self) -> int:
        """The highest plan version held that takes effect at once; -1 when none."""
        with self._changed:
            return max((plan_version for plan_version, record in self._records.items() if record.abort), default=-1)

    def wait_for_quorum(self, after: tuple[int, int], least: int, abort: int) -> Quorum | None:
        """Block until there is a quorum behind `after` under plan `abort` or a later one; None when first a record above that
        takes effect at once. Below `least` only that helps: a replica that returns brings a quorum, too, but it was formed by
        who counted on the step that failed."""
        with self._changed:
            while True:
                if self.newest_abort > abort:
                    return None
                found = [place for place in self._quorums if place > after and place[0] >= abort >= least]
                if found:
                    return self._quorums[min(found)]
                self._changed.wait()

    def quorum(self, plan_version: int, iteration: int) -> Quorum:
        """Block until this quorum, which another rank has, is here too."""
        with self._changed:
            while (plan_version, iteration) not in self._quorums:
                self._changed.wait()
            return self._quorums[plan_version, iteration]

    def _take_quorum(self, quorum: Quorum) -> None:
        with self._changed:
            self._quorums.setdefault(quorum.place, quorum)
            for place in sorted(self._quorums)[:-_QUORUMS]:
                del self._quorums[place]
            self._changed.notify_all()

    def _take(self, record: PlanRecord) -> None:
        with self._changed:
            self._records[record.plan.plan_version] = record
            if self._kept is not None and self._leaves_out(record) and record.plan.plan_version > self._kept.plan_version:
                self._kept.stop()
            if record.abort and self._comm is not None and record.plan.plan_version > self._comm.plan_version:
                self._comm.stop()
            self._changed.notify_all()

    def _take_published(self, published: Published) -> None:
        with self._changed:
            self._published = published
            self._changed.notify_all()

    def _take_judged(self, judged: Judged) -> None:
        with self._changed:
            self._judged = max(self._judged, judged.iterations)
            self._changed.notify_all()

    def _take_order(self, order: MeasureStandby) -> None:
        if self._rank_spec.rank in order.ranks:
            with self._changed:
                self._measure = order
                self._changed.notify_all()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, PlanRecord):
                self._take(message)
            elif isinstance(message, MeasureStandby):
                self._take_order(message)
            elif isinstance(message, Judged):
                self._take_judged(message)
            elif isinstance(message, Published):
                self._take_published(message)
            elif isinstance(message, QuorumFound):
                self._take_quorum(message.quorum)
            elif isinstance(message, Stop):
                self._end(0)
        self._end(3)

    def _end(self, code: int) -> None:
        self._last_words()
        os._exit(code)

    def _beat(self, page: HeartbeatPage) -> None:
        progress, pid, thread = self._progress, os.getpid(), threading.get_native_id()
        count, moved_s, peak, asked_s = -1, 0.0, 0, -inf
        while True:
            now_s = time.monotonic()
            if self._rank_spec.gpu is None or now_s - asked_s >= GPU_MEMORY_S:
                peak, asked_s = peak_bytes(self._rank_spec.gpu), now_s
            if progress.count != count:
                count, moved_s = progress.count, now_s
            beat = Beat(
                pid=pid, thread=thread, count=count, iteration=progress.iteration, activity=progress.activity,
                waits_for=progress.waits_for, promised_s=progress.promised_s, at_s=now_s, moved_s=moved_s,
                peak_bytes=peak,
            )  # fmt: skip
            page.write(self._rank_spec.rank, beat)
            time.sleep(BEAT_S)


def peak_bytes(gpu: int | None) -> int:
    """The most memory so far: of this process, or in tensors of its GPU."""
    if gpu is not None:
        return torch.cuda.max_memory_allocated(gpu)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
