"""The dashboard as a process: on this machine only, and never longer than whoever started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.request import urlopen

import unskew.dashboard
from unskew.collector.paths import Store
from unskew.collector.rights import open_file

ADDRESS = "127.0.0.1"
FIRST_PORT = 8501
PORTS = 100
READY_WITHIN_S = 60.0
STARTS = 5
_PR_SET_PDEATHSIG = 1
_LISTENS = "0A"


def folder() -> Path:
    """Where the dashboard is installed."""
    return Path(unskew.dashboard.__file__).parent


def is_free(port: int) -> bool:
    """Whether nobody listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
        return True


def free_port(first: int = FIRST_PORT) -> int:
    """`first`, or the next port that nobody listens on. Raises `DashboardError` when none of 100 is free."""
    for port in range(first, first + PORTS):
        if is_free(port):
            return port
    raise DashboardError(f"no port from {first} to {first + PORTS - 1} on {ADDRESS} is free")


class DashboardError(Exception):
    """The dashboard does not come up; one sentence."""


class DashboardProcess:
    """A dashboard over `store`, whose folder exists; its output goes to dashboard.log there, or, where nothing can be written,
    to a temporary file, which goes with it unless it failed. `close` ends it.

    It is on its way when this returns, on `port` or on the first free one; `ready` waits for it.
    """

    def __init__(self, store: Store, port: int | None = None) -> None:
        self.log = store.root / "dashboard.log"
        self._root, self._any_port = store.root, port is None
        self._start(free_port() if port is None else port)

    def ready(self) -> str:
        """The address, once the dashboard answers there. Raises `DashboardError` when it does not come up.

        A port that somebody else took meanwhile is passed over, unless it was asked for.
        """
        deadline = time.monotonic() + READY_WITHIN_S
        starts = 1
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if not self._any_port or starts == STARTS:
                    raise DashboardError(f"the dashboard ended on port {self._port}; its output is in {self.log}")
                self._start(free_port(self._port + 1))
                starts += 1
            if self._answers():
                return f"http://{ADDRESS}:{self._port}"
            time.sleep(0.05)
        raise DashboardError(f"the dashboard did not answer within {READY_WITHIN_S:g} s; its output is in {self.log}")

    def _start(self, port: int) -> None:
        self._port = port
        try:
            log = _opened(self.log)
        except OSError:
            log, name = tempfile.mkstemp(prefix="unskew-dashboard-", suffix=".log")
            self.log = Path(name)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(port)],
                env={**os.environ, "UNSKEW_STORE": str(self._root)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command; it ends this process itself
            )
        finally:
            os.close(log)

    def _answers(self) -> bool:
        # Another run's dashboard may have taken the port and would answer as well.
        if not _listens(self._process.pid, self._port):
            return False
        try:
            with urlopen(f"http://{ADDRESS}:{self._port}/_stcore/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> int:
        """Its exit status, once it ends."""
        return self._process.wait()

    def close(self) -> None:
        """End it; does nothing when it has ended."""
        if self._process.poll() is None and not self.log.is_relative_to(self._root):
            self.log.unlink()
        self._process.terminate()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> DashboardProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _opened(path: Path) -> int:
    """Raises `OSError` where nothing can be written, also for want of space: Streamlit ends where its first line is refused."""
    log = open_file(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(log, b"\n")
    except OSError:
        os.close(log)
        raise
    return log


def _listens(pid: int, port: int) -> bool:
    """Whether the process itself listens on the port (Linux; elsewhere taken for granted)."""
    if sys.platform != "linux":
        return True
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == _LISTENS}
    try:
        return any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115 - not a path
    except OSError:  # a file that was closed meanwhile, a process that ended
        return False


def become_dashboard(parent: int, port: int) -> None:
    """Turn this process into Streamlit, to be killed by the kernel when its parent dies (Linux; elsewhere `close` must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    options = {"server.port": port, "server.address": ADDRESS, "server.headless": "true", "browser.gatherUsageStats": "false"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "streamlit", "run", str(folder()), *flags])


if __name__ == "__main__":
    become_dashboard(int(sys.argv[1]), int(sys.argv[2]))
