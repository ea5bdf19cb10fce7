"""The controller's side of the agents: who is connected, who is alive, what they send, who has entered a plan."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from unskew.analytics.health.liveness import RankLiveness
from unskew.analytics.loop.controller_rules import Issue
from unskew.collector.events import PlanApplied, Regrouped
from unskew.collector.rights import make_folder, open_file
from unskew.runtime.protocol import (
    MOST_BYTES,
    AnyMessage,
    Channel,
    FaultAnnounced,
    Hello,
    Message,
    NodeFinished,
    PlanEntered,
    RankExited,
    RankFinished,
    RankForked,
    RankStatuses,
)

_CONNECT_S = 60.0
_ACCEPT_S = 0.2
_HELLO_S = 2.0
_STOP_S = 5.0
_REAP_S = 0.5
_LONGEST_FOLDER = 90
"""Bytes; the address of a socket in it may have 107."""


class AgentLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """The agent is gone, and with it every rank of its node."""


def _folder() -> Path:
    """A folder for the agent's sockets: in the system's temporary one, unless its name is too long for an address."""
    folder = Path(tempfile.mkdtemp(prefix="unskew-agent-"))
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="unskew-agent-", dir="/tmp"))


class Membership:
    """Starts the node's agent, keeps the status of every rank, and passes messages on."""

    def __init__(self, log: Path) -> None:
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_ACCEPT_S)
        self.folder = _folder()
        make_folder(log.parent)
        self._log = log
        port = str(self._listener.getsockname()[1])
        with os.fdopen(open_file(log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unskew.runtime.node.agent", "127.0.0.1", port, "node-0", str(self.folder)],
                env={
                    **os.environ,
                    "UNSKEW_SECRET": self._secret,
                    "GLOO_SOCKET_IFNAME": "lo",
                    # A lost reverse look-up of an address would stall a rank's start by five seconds.
                    "RES_OPTIONS": "timeout:1 attempts:1",
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A Ctrl-C in the terminal is the controller's to handle.
                start_new_session=True,
            )
        self._agent: Channel | None = None
        self.ahead_us = 0
        """The node's wall clock minus ours, not more than it is: the greeting's travel time is in it."""
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, RankLiveness] = {}
        self.finished: dict[int, RankFinished] = {}
        """Living ranks that have committed every iteration."""
        self.last_word = NodeFinished(unwritten=0)
        """The agent's, once it was asked to end."""
        self._iterations: dict[int, int] = {}
        self.longest_work_s = 0.0
        """The longest recent stretch of work of any rank that then moved on."""

    def connect(self, check_interrupt: Callable[[], None]) -> str:
        """Wait for the agent and check its secret; its node's name. Raises `AgentLost`."""
        until = time.monotonic() + _CONNECT_S
        while time.monotonic() < until and self._process.poll() is None:
            check_interrupt()
            with suppress(TimeoutError):
                if (node := self._greet(self._listener.accept()[0])) is not None:
                    self._listener.close()
                    return node
        raise AgentLost(f"the agent did not connect within {_CONNECT_S:.0f} s, or ended, see {self._log}")

    def _greet(self, sock: socket.socket) -> str | None:
        """The node's name if it is our agent that connected; a stranger is sent away."""
        sock.settimeout(_HELLO_S)
        channel = Channel(sock, most_bytes=4096)
        with suppress(OSError, msgspec.DecodeError):
            hello = channel.receive()
            if isinstance(hello, Hello) and secrets.compare_digest(hello.secret, self._secret):
                sock.settimeout(None)
                channel.most_bytes = MOST_BYTES
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._agent = channel
                self.ahead_us = hello.at_us - time.time_ns() // 1000
                return hello.node
        channel.close()
        return None

    def send(self, message: Message) -> None:
        """To the agent. Raises `AgentLost`."""
        try:
            self._connected().send(message)
        except OSError as error:
            raise AgentLost(f"the agent is gone, see {self._log}") from error

    def poll(self, wait_s: float) -> list[AnyMessage]:
        """What arrives within `wait_s`, at once when something does. Raises `AgentLost`."""
        if not select.select([self._connected()], [], [], wait_s)[0]:
            return []
        messages, still_open = self._connected().available()
        for message in messages:
            self._note(message)
        if not still_open:
            raise AgentLost(f"the agent is gone, see {self._log}")
        return messages

    def stop(self, farewell: Message) -> None:
        """Let the agent end its ranks and itself, and hear what it could not write; by force when it takes longer than 5 s."""
        until = time.monotonic() + _STOP_S
        if self._agent is not None:
            with suppress(OSError):
                self._agent.send(farewell)
                self._hear_out(self._agent, until)
            self._agent.close()
        try:
            self._process.wait(max(until - time.monotonic(), _REAP_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hear_out(self, agent: Channel, until: float) -> None:
        """Until the agent has said its last word and is gone; that its ranks end now is no news."""
        still_open = True
        while still_open and select.select([agent], [], [], max(until - time.monotonic(), 0.0))[0]:
            messages, still_open = agent.available()
            self.last_word = next((message for message in messages if isinstance(message, NodeFinished)), self.last_word)

    def iteration_of(self, rank: int) -> int:
        """The iteration that a rank, living or dead, was last known to work on."""
        return self._iterations.get(rank, 0)

    @property
    def committed(self) -> int:
        """How many iterations some rank is known to have committed: the one it works on comes after them."""
        return max([*self._iterations.values(), *(report.committed for report in self.finished.values())], default=0)

    def _note(self, message: AnyMessage) -> None:
        if isinstance(message, RankForked):
            self.pids[message.rank] = message.pid
        elif isinstance(message, RankFinished):
            self.finished[message.rank] = message
        elif isinstance(message, FaultAnnounced):
            self._iterations[message.fault.rank] = message.iteration
        elif isinstance(message, RankExited):
            self.pids.pop(message.rank, None)
            self.statuses.pop(message.rank, None)
            self.finished.pop(message.rank, None)
        elif isinstance(message, RankStatuses):
            now = time.monotonic()
            self.longest_work_s = max((status.longest_work_s for status in message.statuses), default=0.0)
            for status in message.statuses:
                if status.rank in self.pids:
                    self._iterations[status.rank] = status.iteration
                    self.statuses[status.rank] = msgspec.structs.replace(status, at_s=now)

    def _connected(self) -> Channel:
        if self._agent is None:
            raise AgentLost("the agent is not connected yet")
        return self._agent


class PlanEntry(msgspec.Struct, kw_only=True):
    """A plan on its way. `asked_ns`: when the loss was noticed, None for a change at a boundary."""

    issued: Issue
    asked_ns: int | None
    entered: dict[int, PlanEntered] = {}

    def take(self, message: PlanEntered, alive: frozenset[int], watermark: int) -> tuple[PlanApplied, Regrouped] | None:
        """Note that a rank acts on a plan; what to log of this one when it was the last one missing.

        `watermark`: iterations judged so far.
        """
        plan = self.issued.plan
        if message.plan_version != plan.plan_version:
            return None
        self.entered[message.rank] = message
        if not alive.intersection(plan.ranks) <= self.entered.keys():
            return None
        members = self.entered.values()
        iteration = max(member.iteration for member in members)
        began_ns = self.asked_ns or min(member.began_ns for member in members)
        return PlanApplied(
            plan_version=plan.plan_version,
            digest=plan.digest,
            proposal=self.issued.proposal,
            iteration=iteration,
            reason=self.issued.reason,
            plan=plan.to_data(),
            watermark=watermark,
        ), Regrouped(
            plan_version=plan.plan_version,
            iteration=iteration,
            seconds=(max(member.at_ns for member in members) - began_ns) / 1e9,
            migrate_seconds=max(member.migrate_s for member in members),
            moved_bytes=sum(member.moved_bytes for member in members),
        )
