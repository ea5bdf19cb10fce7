"""The dashboard as a process: on this machine only, and never longer than whoever started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import unskew.dashboard
from unskew.collector.paths import Store

ADDRESS = "127.0.0.1"
FIRST_PORT = 8501
PORTS = 100
_PR_SET_PDEATHSIG = 1


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


def free_port() -> int:
    """8501, or the next port that nobody listens on. Raises `OSError` when none of 100 is free."""
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        if is_free(port):
            return port
    raise OSError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {ADDRESS} is free")


class DashboardProcess:
    """A running dashboard over `store`, whose folder exists; its output goes to dashboard.log there. `close` ends it."""

    def __init__(self, store: Store, port: int) -> None:
        self.url = f"http://{ADDRESS}:{port}"
        self.log = store.root / "dashboard.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(port)],
                env={**os.environ, "UNSKEW_STORE": str(store.root)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command; it ends this process itself
            )

    def wait(self) -> int:
        """Its exit status, once it ends."""
        return self._process.wait()

    def close(self) -> None:
        """End it; does nothing when it has ended."""
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


def become_dashboard(parent: int, port: int) -> None:
    """Turn this process into Streamlit, to be killed by the kernel when its parent dies (Linux; elsewhere `close` must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    options = {"server.port": port, "server.address": ADDRESS, "server.headless": "true", "browser.gatherUsageStats": "false"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(folder()), *flags])


if __name__ == "__main__":
    become_dashboard(int(sys.argv[1]), int(sys.argv[2]))
