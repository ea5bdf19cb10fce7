"""The controller's side of the agents: who is connected, who is alive, and what they say."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from unskew.analytics.liveness import Pulse
from unskew.runtime.protocol import AnyMessage, Channel, Exited, Forked, Hello, Injected, Message, Pulses

_STOP_S = 5.0


class AgentLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """The agent is gone, and with it every rank of its node."""


class Membership:
    """Starts the node's agent, keeps the pulse of every rank, and passes messages on."""

    def __init__(self, log: Path) -> None:
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60.0)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unskew.runtime.agent", "127.0.0.1", str(self._listener.getsockname()[1]), "node-0"],
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
        self.pids: dict[int, int] = {}
        self.pulses: dict[int, Pulse] = {}
        self._iterations: dict[int, int] = {}

    def connect(self) -> str:
        """Wait for the agent and check its secret; its node's name. Raises `AgentLost`."""
        while self._agent is None:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise AgentLost(f"the agent did not connect within 60 s, see {self._log}") from None
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock)
            hello = channel.receive()
            if isinstance(hello, Hello) and secrets.compare_digest(hello.secret, self._secret):
                self._agent, node = channel, hello.node
            else:
                channel.close()
        self._listener.close()
        return node

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
        """Let the agent end its ranks and itself; by force when it takes longer than 5 s."""
        if self._agent is not None:
            with suppress(OSError):
                self._agent.send(farewell)
            self._agent.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def iteration_of(self, rank: int) -> int:
        """The iteration that a rank, living or dead, was last known to work on."""
        return self._iterations.get(rank, 0)

    def _note(self, message: AnyMessage) -> None:
        if isinstance(message, Forked):
            self.pids[message.rank] = message.pid
        elif isinstance(message, Injected):
            self._iterations[message.fault.rank] = message.iteration
        elif isinstance(message, Exited):
            self.pids.pop(message.rank, None)
            self.pulses.pop(message.rank, None)
        elif isinstance(message, Pulses):
            now = time.monotonic()
            for pulse in message.pulses:
                if pulse.rank in self.pids:
                    self._iterations[pulse.rank] = pulse.iteration
                    self.pulses[pulse.rank] = Pulse(
                        rank=pulse.rank,
                        at_s=now,
                        alive=True,
                        heartbeat_age_s=pulse.heartbeat_age_s,
                        stalled_s=pulse.stalled_s,
                        activity=pulse.activity,
                        waits_for=pulse.waits_for,
                        process_state=pulse.state,
                    )

    def _connected(self) -> Channel:
        if self._agent is None:
            raise AgentLost("the agent is not connected yet")
        return self._agent
