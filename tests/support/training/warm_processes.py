"""Agents, zygotes, collectors, commands and scripts forked from a process that has imported all they need and loaded the corpus
once, which is two thirds of a small run's CPU.

What differs from a run for people is how these come to be; that by exec is what the tests of commands and of processes run.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, Any, NoReturn
from unittest.mock import patch

from unskew.collector.paths import Store
from unskew.collector.rights import open_file

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


class Forker:
    """The process at the other end of a socket, which forks what it is asked for."""

    def __init__(self, asking: socket.socket) -> None:
        self._socket = asking

    def start_agent(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Forked:
        """As the function of this name in runtime/control/membership.py."""
        return self._start("agent", arguments, environment, output)

    def start_in_background(self, store: Store, module: str, log: str) -> int:
        """As the function of this name in collector/background.py. Whoever ends is a zombie until its agent ends."""
        with os.fdopen(open_file(store.root / log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            return self._start("background", [module, "--store", str(store.root)], os.environ, output).pid

    def start_command(self, *arguments: str) -> Forked:
        """`unskew ARGUMENTS`, whose words nobody reads; its own agent is forked, too."""
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            return self._start("command", arguments, os.environ, nowhere)

    def run_script(self, file: str, *arguments: str, timeout_s: float = 200.0) -> tuple[int, str]:
        """`python FILE ARGUMENTS`: its exit code, and what it printed; agents of its runs are forked, too."""
        with tempfile.TemporaryFile() as printed:
            code = self._start("script", [file, *arguments], os.environ, printed).wait(timeout_s)
            printed.seek(0)
            return code, printed.read().decode()

    def _start(self, what: str, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Forked:
        question = {"what": what, "arguments": arguments, "environment": dict(environment)}
        return Forked(self._ask(question, output.fileno()), lambda pid: self._ask({"pid": pid}))

    def _ask(self, question: dict[str, Any], *descriptors: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
        return json.loads(self._socket.recv(_MOST_BYTES))


class WarmProcess(Forker):
    """One per test session, begun by its first run."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        super().__init__(ours)
        # Threads of torch's and of Arrow's own would not survive a fork.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, "-P", "-m", "support.training.warm_processes", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self.pid = self._process.pid
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._socket.close()  # which ends it
        self._process.wait()


_warm: list[WarmProcess] = []


def warm_pids() -> set[int]:
    """The process that forks outlives the tests that had it fork."""
    return {one.pid for one in _warm}


def warm_process() -> WarmProcess:
    if not _warm:
        _warm.append(WarmProcess())
    return _warm[0]


@contextmanager
def forked_agents(by: Forker | None = None) -> Iterator[None]:
    """Runs that begin meanwhile in this process have forked agents."""
    with patch("unskew.runtime.control.membership.start_agent", (by or warm_process()).start_agent):
        yield


def _load() -> None:
    """What takes so long, and what runs of the tests' sizes train on."""
    import pyarrow  # type: ignore[import-untyped]  # noqa: F401, PLC0415
    import torch.distributed.checkpoint  # noqa: F401, PLC0415
    from support.training import runtime_runs  # noqa: PLC0415

    from unskew import cli  # noqa: F401, PLC0415
    from unskew.collector.service import collecting, showing, snapshot  # noqa: F401, PLC0415
    from unskew.runtime import data  # noqa: PLC0415
    from unskew.runtime.node import agent, zygote  # noqa: F401, PLC0415

    snapshot._views_alone()  # as long as all else that a small run's collector does
    data.load_corpus = cache(data.load_corpus)
    data.load_corpus(None, runtime_runs.SMALL.tokens)
    gc.collect()
    gc.freeze()  # each zygote collects what is left: nothing


def _serve(asking: socket.socket) -> None:
    """Fork for whoever asks, until that process has ended."""
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


def _fork(what: str, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    pid = os.fork()
    if pid == 0:
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [*arguments] if what == "script" else [what, *arguments]
        _become({"agent": _agent, "background": _background, "command": _command, "script": _script}[what], keep=())
    os.close(output)
    return pid


def _agent() -> None:
    from unskew.runtime.node import agent  # noqa: PLC0415

    with (
        _forker() as forker,
        patch("unskew.collector.service.process.start_in_background", forker.start_in_background),
        patch.object(agent, "_start_zygote", _forked_zygote),
    ):
        agent.main()


def _background() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _, module, *arguments = sys.argv
    sys.exit(importlib.import_module(module).main(arguments))


def _command() -> None:
    from unskew.__main__ import main  # noqa: PLC0415

    with _forker() as forker, forked_agents(forker):
        main()


def _script() -> None:
    with _forker() as forker, forked_agents(forker):
        runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def _forker() -> Iterator[Forker]:
    """A child that is begun now, while no thread but this one runs, and forks what this process asks for."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _become(lambda: _serve(theirs), keep=(theirs.fileno(),))
    theirs.close()
    yield Forker(ours)


def _forked_zygote(memory: int) -> tuple[Forked, Any]:
    from unskew.runtime.channel import Channel  # noqa: PLC0415
    from unskew.runtime.heartbeat_page import HeartbeatPage  # noqa: PLC0415
    from unskew.runtime.node.processes import die_with_parent  # noqa: PLC0415
    from unskew.runtime.node.zygote import Zygote  # noqa: PLC0415

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
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _load()
    _serve(socket.socket(fileno=int(sys.argv[1])))
