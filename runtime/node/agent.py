"""The agent: one per node. It owns the node's ranks (through the zygote), looks at their heartbeats, and keeps the collector
alive.

One thread, one loop. When the controller is gone it waits a while for one that takes over by its socket, and then stops its
ranks: nothing of a run outlives its controller for long. Meanwhile it makes their checkpoints whole.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from unskew.collector.events import Fault, Heartbeat, HostClock, Note
from unskew.collector.locks import hold
from unskew.collector.paths import Store
from unskew.collector.process_log import report
from unskew.collector.service.process import KeptCollector
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.channel import Channel, accept_own, readable
from unskew.runtime.heartbeat_page import HeartbeatPage, shared_memory
from unskew.runtime.node.checkpoints import CheckpointKeeper
from unskew.runtime.node.heartbeats import STATUS_S, HeartbeatTable
from unskew.runtime.node.processes import how_it_ended
from unskew.runtime.node.rendezvous import RendezvousTable
from unskew.runtime.node.waiting import announce
from unskew.runtime.priority import answer_at_once
from unskew.runtime.protocol import (
    AGENT_LOCK,
    AGENT_SOCKET,
    AnyMessage,
    Await,
    CheckpointPart,
    FaultAnnounced,
    Hello,
    Judged,
    Kill,
    MeasureStandby,
    Message,
    NodeFinished,
    PlanRecord,
    Prepare,
    Publish,
    QuorumFound,
    RankExited,
    RankForked,
    RankStatuses,
    Start,
    Stop,
    TakeOver,
    ZygoteExited,
)

_HOUSEKEEPING_S = 1.0
_GOODBYE_S = 1.5
_SEND_S = 1.0
_SEND_BUFFER = 8 << 20


class Agent:
    """`controller` is the connection to the controller, `node` names this node in the run, `folder` is for its sockets."""

    def __init__(self, controller: Channel, node: str, folder: Path) -> None:
        self._controller: Channel | None = controller
        self._node, self._folder = node, folder
        self._reports: dict[tuple[type, int | Fault | None], Message] = {}
        self._wait_s, self._wait_until = 0.0, inf
        self._checkpoints: CheckpointKeeper | None = None
        memory = shared_memory()
        self._zygote_process, self._zygote = _start_zygote(memory)
        self._page = HeartbeatPage(memory)
        self._ranks = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ranks.bind(str(folder / AGENT_SOCKET))
        self._ranks.listen(1024)
        self._channels: list[Channel] = []
        self._records: list[PlanRecord] = []
        self._newest_plan = -1
        self._judged = Judged(iterations=0)
        self._rendezvous: RendezvousTable[Channel] = RendezvousTable()
        self._table = HeartbeatTable()
        self._collector: KeptCollector | None = None
        self._spool: SpoolWriter | None = None
        self._running = True

    def serve(self) -> None:
        """Until Stop, or until the zygote is gone, or the controller with no other in time."""
        handlers: dict[int, Callable[[], None]] = {
            self._zygote.fileno(): self._hear_zygote,
            self._ranks.fileno(): self._accept,
        }
        next_status = next_housekeeping = time.monotonic()
        try:
            while self._running:
                of_ranks = {channel.fileno(): channel for channel in self._channels}
                wait_s = max(min(next_status, next_housekeeping) - time.monotonic(), 0.0)
                controller = [] if self._controller is None else [self._controller.fileno()]
                # Ranks first: what one sent before it died must be passed on before its death is.
                for descriptor in readable([*of_ranks, *controller, *handlers], wait_s):
                    if descriptor in controller:
                        self._hear_controller()
                    elif descriptor in handlers:
                        handlers[descriptor]()
                    else:
                        self._from_rank(of_ranks[descriptor])
                now = time.monotonic()
                self._running = self._running and now < self._wait_until
                if now >= next_status:
                    next_status = now + STATUS_S
                    self._table.read(self._page)
                    self._table.look(now)
                    self._send_controller(RankStatuses(statuses=self._table.statuses(now)))
                if now >= next_housekeeping:
                    next_housekeeping = now + _HOUSEKEEPING_S
                    self._keep_house(now)
        finally:
            self._stop()

    def _hear_zygote(self) -> None:
        messages, still_open = self._zygote.available()
        for message in messages:
            self._from_zygote(message)
        if not still_open and self._running:
            self._running = False
            self._report(ZygoteExited(detail=how_it_ended(self._zygote_process, _GOODBYE_S)))

    def _hear_controller(self) -> None:
        if self._controller is None:
            return
        messages, still_open = self._controller.available()
        for message in messages:
            self._from_controller(message)
        if not still_open:
            self._lose_controller(self._controller.end)

    def _lose_controller(self, why: str) -> None:
        if self._controller is not None:
            report(f"agent: the connection to the controller is gone: {why}")
            self._controller.close()
        self._controller, self._wait_until = None, time.monotonic() + self._wait_s
        for message in self._reports.values():  # it may have gone between two parts
            self._make_whole(message)

    def _make_whole(self, message: Message) -> None:
        """What the controller does of a rank's part of a checkpoint, where there is none to do so."""
        if isinstance(message, CheckpointPart) and self._checkpoints is not None:
            noted = self._checkpoints.take(message)
            if isinstance(noted, Note):
                report(f"agent: {noted.text}")

    def _taken_over(self, channel: Channel) -> None:
        """A rank's place at the socket is a controller's, which holds the run's lock: it hears again what was last said to the
        one before."""
        self._channels.remove(channel)
        self._lose_controller("another one takes over")
        self._controller, self._wait_until = channel, inf
        for message in (Hello(secret="", node=self._node, at_us=time.time_ns() // 1000), *self._reports.values()):
            self._send_controller(message)

    def _from_controller(self, message: AnyMessage) -> None:
        if isinstance(message, Prepare):
            store = Store(Path(message.store))
            self._collector = KeptCollector(store)
            self._spool = SpoolWriter(store, message.run, f"agent-{self._node}")
            self._spool.append(_compared(self._node, message.ahead_us, time.time_ns() // 1000 - message.at_us))
            self._zygote.send(message)
        elif isinstance(message, Start):
            one = message.rank_specs[0]
            store, options = Store(Path(one.store)), one.options
            self._wait_s = options.controller_wait
            if one.joins is None:  # the first of the run: of the lock that is held from then on nobody need ask
                announce(store, one.run, self._folder)
                self._checkpoints = CheckpointKeeper(store, one.run, options.n_layers, before=options.resume)
            self._zygote.send(message)
        elif isinstance(message, PlanRecord) and message.plan.plan_version > self._newest_plan:
            self._newest_plan = message.plan.plan_version
            self._records = [message] if message.abort else [*self._records, message]
            self._rendezvous.clear()
            self._pass_on_to_all(message)
        elif isinstance(message, MeasureStandby | QuorumFound):
            self._pass_on_to_all(message)
        elif isinstance(message, Judged):
            self._judged = message
            self._pass_on_to_all(message)
        elif isinstance(message, Kill):
            self._zygote.send(message)
        elif isinstance(message, Stop):
            self._running = False

    def _from_zygote(self, message: AnyMessage) -> None:
        if isinstance(message, RankForked):
            self._table.born(message.rank, message.pid, time.monotonic())
        elif isinstance(message, RankExited):
            self._table.gone(message.rank)
        self._report(message)

    def _accept(self) -> None:
        sock = accept_own(self._ranks)
        if sock is None:
            report("another user connected to the agent's socket and was sent away")
            return
        # A rank that does not read (it is stopped) must not stop the agent: plans fit the buffer, and a send gives up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        sock.settimeout(_SEND_S)
        channel = Channel(sock)
        self._channels.append(channel)
        # A rank that connects after a record was sent gets it now.
        for message in (*self._records, self._judged):
            self._pass_on(channel, message)

    def _pass_on_to_all(self, message: Message) -> None:
        for channel in list(self._channels):
            self._pass_on(channel, message)

    def _pass_on(self, channel: Channel, message: Message) -> None:
        """Send to a rank; one that cannot be reached is cut off, and ends itself."""
        try:
            channel.send(message)
        except OSError:
            self._cut_off(channel)

    def _from_rank(self, channel: Channel) -> None:
        messages, still_open = channel.available()
        for message in messages:
            if isinstance(message, Publish):
                self._answer(self._rendezvous.publish(message.key, message.value))
            elif isinstance(message, Await):
                self._answer(self._rendezvous.ask(channel, message.keys))
            elif isinstance(message, TakeOver):
                self._taken_over(channel)
                return
            else:
                self._report(message)
        if not still_open:
            self._cut_off(channel)

    def _answer(self, answers: Sequence[tuple[Channel, Message]]) -> None:
        for channel, answer in answers:
            self._pass_on(channel, answer)

    def _cut_off(self, channel: Channel) -> None:
        if channel in self._channels:
            self._channels.remove(channel)
        self._rendezvous.forget(channel)
        channel.close()

    def _keep_house(self, now: float) -> None:
        if self._collector is None or self._spool is None:
            return
        self._collector.keep()
        for status in self._table.statuses(now):
            self._spool.append(
                Heartbeat(
                    rank=status.rank,
                    pid=self._table.pid(status.rank),
                    iteration=status.iteration,
                    progress=self._table.count(status.rank),
                    activity=status.activity,
                    age_us=int(status.heartbeat_age_s * 1e6),
                    stalled_us=int(status.stalled_s * 1e6),
                    waits_for=status.waits_for,
                    longest_gap_us=int(self._table.take_longest_gap_s(status.rank) * 1e6),
                    peak_bytes=self._table.peak_bytes(status.rank),
                )
            )

    def _report(self, message: Message) -> None:
        """Tell the controller, and keep it for one that takes over: the last of each kind and rank, and every fault."""
        key = type(message), message.fault if isinstance(message, FaultAnnounced) else getattr(message, "rank", None)
        self._reports.pop(key, None)
        self._reports[key] = message
        if self._controller is None:
            self._make_whole(message)
        self._send_controller(message)

    def _send_controller(self, message: Message) -> None:
        try:
            if self._controller is not None:
                self._controller.send(message)
        except OSError as error:
            self._lose_controller(error.strerror or str(error))

    def _stop(self) -> None:
        """Let the ranks hand over their events, then end them and the zygote."""
        for channel in self._channels:
            _send(channel, Stop())
        until = time.monotonic() + _GOODBYE_S
        while self._channels and time.monotonic() < until:
            ready = readable(self._channels, 0.1)
            self._channels = [one for one in self._channels if one.fileno() not in ready or one.available()[1]]
        _send(self._zygote, Stop())
        self._zygote.close()
        try:
            self._zygote_process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            # It is stopped or loading; the kernel ends its ranks with it.
            self._zygote_process.kill()
            self._zygote_process.wait()
        if self._collector is not None:
            self._collector.keep(at_once=True)  # or what was written last would wait for the next run where it has just gone
        if self._spool is not None:
            self._spool.close()
            self._report(NodeFinished(unwritten=self._spool.unwritten, problem=self._spool.problem))
        shutil.rmtree(self._folder, ignore_errors=True)


def _compared(node: str, least_us: int, most_us: int) -> HostClock:
    """Our wall clock against the controller's: ahead by `least_us` to `most_us`; the travel times of two messages lie
    between."""
    return HostClock(node=node, offset_us=(least_us + most_us) // 2, within_us=(most_us - least_us + 1) // 2)


def _start_zygote(memory: int) -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "unskew.runtime.node.zygote", str(theirs.fileno()), str(memory)]
    # By default torch starts CUDA where a module asks whether it is there, as some do when they are imported, and then no rank
    # that is forked could use it.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # A session of its own: where the kernel shares cores among sessions, the ranks' load is not the agent's.
    process = subprocess.Popen(command, pass_fds=[theirs.fileno(), memory], start_new_session=True, env=environment)
    theirs.close()
    return process, Channel(ours)


def _send(channel: Channel, message: Message) -> None:
    with suppress(OSError):
        channel.send(message)


def main() -> None:
    """``python -m unskew.runtime.node.agent HOST PORT NODE FOLDER``, the secret in $UNSKEW_SECRET."""
    answer_at_once()
    host, port, node, folder = sys.argv[1:]
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(sock)
    channel.send(Hello(secret=os.environ.pop("UNSKEW_SECRET"), node=node, at_us=time.time_ns() // 1000))
    lock = hold(Path(folder) / AGENT_LOCK)  # as long as it lives the folder is nobody's to remove
    Agent(channel, node, Path(folder)).serve()
    if lock is not None:
        lock.release()


if __name__ == "__main__":
    main()
