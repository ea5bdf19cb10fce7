"""The zygote: a process that has imported everything and loaded the corpus, and forks ranks in milliseconds.

It never starts a thread and runs no tensor operation in any but its own, so a fork of it is sound. It is the ranks' parent:
it reaps them and reports how they ended. When the agent is gone it kills them and ends.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from contextlib import suppress

# The first backward imports it: a second's work, once here and not in all ranks; so does their first plan the other.
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import unskew.analytics.core.layout  # noqa: F401
from unskew.collector.process_log import report
from unskew.runtime.channel import Channel, readable
from unskew.runtime.corpus import CorpusError
from unskew.runtime.data import Data, load_data
from unskew.runtime.heartbeat_page import HeartbeatPage
from unskew.runtime.model.own_model import model_of
from unskew.runtime.node.gpus import node_gpus
from unskew.runtime.node.processes import die_with_parent, exit_detail
from unskew.runtime.own import OwnError
from unskew.runtime.priority import answer_at_once
from unskew.runtime.protocol import AnyMessage, Kill, Prepare, RankExited, RankForked, RankSpec, Ready, Start, Stop
from unskew.runtime.rank.checkpoint import warm_up
from unskew.runtime.rank.rank import run_rank
from unskew.runtime.replicas.rank import ReplicaRank

_REAPED_AFTER_S = 0.05
"""While the last thread of a rank cleans up, who reaps the rank waits for that in the kernel, at a full core: in real time that
thread comes to no core, and it was up to a second in which no death was reported."""


class Zygote:
    def __init__(self, channel: Channel, page: HeartbeatPage) -> None:
        self._channel, self._page = channel, page
        self._corpus: Data | None = None
        self._rank_of_pid: dict[int, int] = {}
        self._reported: list[int] = []
        self._writers: set[str] = set()
        self._child_ended, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup)

    def serve(self) -> None:
        """Until Stop, or until the agent is gone."""
        still_open = True
        while still_open:
            ready = readable([self._channel, self._child_ended], _REAPED_AFTER_S if self._reported else None)
            if self._child_ended in ready:
                os.read(self._child_ended, 4096)
                self._report()
            elif not ready:
                self._reap()
            if self._channel.fileno() in ready:
                messages, still_open = self._channel.available()
                for message in messages:
                    still_open = self._handle(message) and still_open
        for pid in self._rank_of_pid:
            _kill(pid)

    def _handle(self, message: AnyMessage) -> bool:
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, Start):
            for rank_spec in message.rank_specs:
                self._fork(rank_spec)
        elif isinstance(message, Kill):
            for pid, rank in self._rank_of_pid.items():
                if rank == message.rank:
                    _kill(pid)
        return not isinstance(message, Stop)

    def _prepare(self, message: Prepare) -> None:
        problem = ""
        try:
            self._corpus = load_data(message.options)
            model_of(message.options)  # built once, here, for all ranks to copy from
        except (CorpusError, OwnError) as error:
            problem = str(error)
        if message.options.checkpoint_every or message.options.resume is not None:
            warm_up()  # a second of work: once here, not in every rank
        # Collected once here, never in a rank: a collection in the middle of a chunk would look like a slow device.
        gc.collect()
        gc.freeze()
        gc.disable()
        answer_at_once()  # from now on it forks, reaps, and sleeps
        gpus = node_gpus()
        self._channel.send(Ready(gpus=gpus.count, gpu_models=gpus.models, problem=problem))

    def _fork(self, rank_spec: RankSpec) -> None:
        if rank_spec.writer in self._writers:  # asked for by the controller before, too
            return
        try:
            pid = os.fork()
        except OSError as error:
            if rank_spec.joins is None:
                raise
            # The others train on without it; who waits for it gives it up in time, and may ask again.
            report(f"no process could be started for rank {rank_spec.rank}: {error}")
            return
        self._writers.add(rank_spec.writer)
        if pid == 0:
            self._become(rank_spec)
        self._rank_of_pid[pid] = rank_spec.rank
        self._channel.send(RankForked(rank=rank_spec.rank, pid=pid))

    def _become(self, rank_spec: RankSpec) -> None:
        """The child: a rank. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            die_with_parent()
            if self._corpus is not None:
                kind = ReplicaRank if rank_spec.options.recovery == "ft-hsdp" else None
                run_rank(rank_spec, self._corpus, self._page, kind)
                code = 0
        finally:
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _report(self) -> None:
        """Who has ended, before it is reaped."""
        for pid, rank in [*self._rank_of_pid.items()]:
            if (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._channel.send(RankExited(rank=rank, pid=pid, detail=exit_detail(ended), at_ns=time.monotonic_ns()))
                self._reported.append(pid)
                del self._rank_of_pid[pid]

    def _reap(self) -> None:
        while self._reported:
            os.waitpid(self._reported.pop(), 0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    with suppress(BrokenPipeError):
        Zygote(Channel(socket.socket(fileno=int(sys.argv[1]))), HeartbeatPage(int(sys.argv[2]))).serve()
