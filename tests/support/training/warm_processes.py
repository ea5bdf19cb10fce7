"""Agents and zygotes forked from a process that has imported torch once: its import takes two thirds of a small run's CPU.

What differs from a run for people is how these two come to be; that by exec is what the tests of commands and of processes run.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn
from unittest.mock import patch

_STEP_S = 0.005
_MOST_BYTES = 1 << 18


class Forked:
    """A forked process as `subprocess.Popen` shows one; `exit_code` tells how it ended, None while it lives."""

    def __init__(self, pid: int, exit_code: Callable[[int], int | None]) -> None:
        self.pid, self._exit_code = pid, exit_code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_STEP_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmProcess:
    """The process that forks; one per test session, begun by its first run."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a thread of torch's own would not survive a fork
        command = [sys.executable, "-P", "-m", "support.training.warm_processes", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self.pid = self._process.pid
        atexit.register(self._stop)

    def start_agent(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Forked:
        """As the function of this name in runtime/control/membership.py."""
        pid = self._ask({"arguments": arguments, "environment": dict(environment)}, output.fileno())
        return Forked(pid, lambda pid: self._ask({"pid": pid}))

    def _stop(self) -> None:
        self._socket.close()  # which ends it
        self._process.wait()

    def _ask(self, question: dict[str, Any], *descriptors: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
        return json.loads(self._socket.recv(_MOST_BYTES))


_warm: list[WarmProcess] = []


def warm_pids() -> set[int]:
    """The process that forks outlives the tests that had it fork."""
    return {one.pid for one in _warm}


@contextmanager
def forked_agents() -> Iterator[None]:
    """Runs that begin meanwhile in this process have forked agents."""
    if not _warm:
        _warm.append(WarmProcess())
    with patch("unskew.runtime.control.membership.start_agent", _warm[0].start_agent):
        yield


def _serve(asking: socket.socket) -> None:
    """Answer who tests, until that process has ended."""
    import torch.distributed.checkpoint  # noqa: F401, PLC0415 - this and the next are what takes so long

    from unskew.runtime.node import agent, zygote  # noqa: F401, PLC0415

    while True:
        data, descriptors, *_ = socket.recv_fds(asking, _MOST_BYTES, 1)
        if not data:
            return
        question = json.loads(data)
        answer = _exit_code(question["pid"]) if "pid" in question else _fork(**question, output=descriptors[0])
        asking.send(json.dumps(answer).encode())


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_agent(arguments, environment, output)
    os.close(output)
    return pid


def _be_agent(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> NoReturn:
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["agent", *arguments]
    _become(_agent, keep=())


def _agent() -> None:
    from unskew.runtime.node import agent  # noqa: PLC0415

    with patch.object(agent, "_start_zygote", _forked_zygote):
        agent.main()


def _forked_zygote(memory: int) -> tuple[Forked, Any]:
    from unskew.runtime.heartbeat_page import HeartbeatPage  # noqa: PLC0415
    from unskew.runtime.node.processes import die_with_parent  # noqa: PLC0415
    from unskew.runtime.node.zygote import Zygote  # noqa: PLC0415
    from unskew.runtime.protocol import Channel  # noqa: PLC0415

    ours, theirs = socket.socketpair()

    def zygote() -> None:
        die_with_parent()
        with suppress(BrokenPipeError):
            Zygote(Channel(theirs), HeartbeatPage(memory)).serve()

    pid = os.fork()
    if pid == 0:
        _become(zygote, keep=(theirs.fileno(), memory))
    theirs.close()
    return Forked(pid, _exit_code), Channel(ours)


def _become(life: Callable[[], None], keep: Sequence[int]) -> NoReturn:
    """What exec would do: a session of its own, and no descriptors but these. Never returns."""
    code = 1
    try:
        os.setsid()
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
            if descriptor > 2 and descriptor not in keep:
                with suppress(OSError):  # the one that listed them
                    os.close(descriptor)
        life()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
