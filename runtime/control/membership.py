"""The controller's side of the agents: who is connected, who is alive, what they send, who has entered a plan."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from unskew.analytics.health.liveness import RankLiveness
from unskew.analytics.loop.controller_state import Issue
from unskew.collector.events import PlanApplied, Regrouped
from unskew.collector.locks import is_held
from unskew.collector.rights import make_folder, open_file
from unskew.runtime.channel import MOST_BYTES, Channel, readable
from unskew.runtime.node.processes import how_it_ended
from unskew.runtime.options import OptionsError
from unskew.runtime.protocol import (
    AGENT_LOCK,
    AGENT_SOCKET,
    AnyMessage,
    FaultAnnounced,
    Hello,
    Message,
    NodeFinished,
    PlanEntered,
    RankExited,
    RankFinished,
    RankForked,
    RankStatuses,
    TakeOver,
    ZygoteExited,
)

_CONNECT_S = 60.0
_ACCEPT_S = 0.2
_HELLO_S = 2.0
_STOP_S = 5.0
_REAP_S = 0.5
_SOCKETS, _LEFT_S = "unskew-agent-", 10.0
_LONGEST_FOLDER = 90
"""Bytes; the address of a socket in it may have 107."""


class AgentLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """The agent is gone, and with it every rank of its node."""


def socket_folder() -> Path:
    """A folder for the agent's sockets, its user's alone: in the system's temporary one, unless its name is too long. What
    killed agents have left there is removed."""
    folder = Path(tempfile.mkdtemp(prefix=_SOCKETS))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_SOCKETS, dir="/tmp"))
    for other in folder.parent.glob(f"{_SOCKETS}*"):
        with suppress(OSError):
            lock = other / AGENT_LOCK
            if other.stat().st_uid == os.geteuid() and time.time() - lock.stat().st_mtime > _LEFT_S and not is_held(lock):
                shutil.rmtree(other, ignore_errors=True)
    return folder


def start_agent(arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """The node's agent, in a session of its own: a Ctrl-C in the terminal is the controller's to handle."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "unskew.runtime.node.agent", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


class Membership:
    """Starts the node's agent, or takes over one whose sockets are in `folder`; keeps the status of every rank, and passes
    messages on."""

    def __init__(self, log: Path, folder: Path | None = None) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        if folder is None:
            self._start()
        else:
            self.folder = folder
        self._agent: Channel | None = None if folder is None else self._reached()
        self._unread: list[AnyMessage] = []
        self._zygote_ended = ""
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

    def _start(self) -> None:
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_ACCEPT_S)
        self.folder = socket_folder()
        make_folder(self._log.parent)
        port = str(self._listener.getsockname()[1])
        with os.fdopen(open_file(self._log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            self._process = start_agent(
                ["127.0.0.1", port, "node-0", str(self.folder)],
                {
                    **os.environ,
                    "UNSKEW_SECRET": self._secret,
                    "GLOO_SOCKET_IFNAME": "lo",
                    # One question for the addresses of all members, in place of two for each.
                    "GLOO_ENABLE_STORE_V2_API": "1",
                    # A lost reverse look-up of an address would stall a rank's start by five seconds.
                    "RES_OPTIONS": "timeout:1 attempts:1",
                    "OMP_NUM_THREADS": "1",
                },
                output,
            )

    def connect(self, check_interrupt: Callable[[], None]) -> str:
        """Wait for the agent and check its secret, or take it over; its node's name. Raises `AgentLost`."""
        if self._process is None:
            return self._take_over(self._connected())
        until = time.monotonic() + _CONNECT_S
        while time.monotonic() < until and self._process.poll() is None:
            check_interrupt()
            with suppress(TimeoutError):
                if (node := self._greet(self._listener.accept()[0])) is not None:
                    self._listener.close()
                    return node
        raise AgentLost(f"the agent did not connect within {_CONNECT_S:.0f} s, or ended, see {self._log}")

    def _reached(self) -> Channel:
        """The socket of an agent that waits for a controller. Raises `OptionsError`: the run is not ours yet."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(str(self.folder / AGENT_SOCKET))
        except OSError as error:
            sock.close()
            raise OptionsError(f"the ranks of the run are about to end ({error}): resume it from its checkpoint") from error
        return Channel(sock)

    def _take_over(self, agent: Channel) -> str:
        with suppress(OSError):
            agent.send(TakeOver())
            while (message := agent.receive()) is not None:  # until it knows better it takes us for a rank
                if isinstance(message, Hello):
                    return message.node
        raise AgentLost(f"the agent is gone, see {self._log}")

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
            raise self._gone() from error

    def poll(self, wait_s: float) -> list[AnyMessage]:
        """What arrives within `wait_s`, at once when something does. Raises `AgentLost`."""
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        if not readable([self._connected()], wait_s):
            return []
        messages, still_open = self._connected().available()
        for message in messages:
            self._note(message)
        if not still_open:
            raise self._gone()
        return messages

    def _gone(self) -> AgentLost:
        """Who ended, how, and which ranks with it."""
        ranks = f"with it ranks {', '.join(map(str, sorted(self.pids)))}, " if self.pids else ""
        if self._zygote_ended:
            return AgentLost(f"the zygote has ended ({self._zygote_ended}), {ranks}see {self._log}")
        how = ""
        if self._process is not None:
            how = how_it_ended(self._process, _REAP_S)
            if self._process.returncode is None and self._agent is not None:
                how += f", the connection to it is {self._agent.end or 'broken'}"
            how = f" ({how})"
        return AgentLost(f"the agent is gone{how}, {ranks}see {self._log}")

    def put_back(self, messages: list[AnyMessage]) -> None:
        """For the next `poll`."""
        self._unread = messages

    def stop(self, farewell: Message) -> None:
        """Let the agent end its ranks and itself, and hear what it could not write; by force when it takes longer than 5 s."""
        until = time.monotonic() + _STOP_S
        if self._agent is not None:
            with suppress(OSError):
                self._agent.send(farewell)
                self._hear_out(self._agent, until)
            self._agent.close()
        if self._process is None:
            return
        try:
            self._process.wait(max(until - time.monotonic(), _REAP_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hear_out(self, agent: Channel, until: float) -> None:
        """Until the agent has said its last word and is gone; that its ranks end now is no news."""
        still_open = True
        while still_open and readable([agent], max(until - time.monotonic(), 0.0)):
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
        elif isinstance(message, ZygoteExited):
            self._zygote_ended = message.detail
            raise self._gone()
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
            kept=message.kept,
        )
