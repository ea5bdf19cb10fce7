"""The dashboard as a process: where it listens, and that it never outlives who started it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from unskew import dashboard_process
from unskew.collector.paths import Store
from unskew.dashboard_process import ADDRESS, FIRST_PORT, DashboardError, DashboardProcess, free_port, is_free

STARTER = """
import sys, time
from unskew.collector.paths import Store
from unskew.dashboard_process import DashboardProcess
print(DashboardProcess(Store.locate(sys.argv[1])).ready(), flush=True)
time.sleep(600)
"""


def healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/_stcore/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def listening(port: int) -> list[str]:
    """The addresses, as the kernel writes them, that a process listens on with this port."""
    tables = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in tables if row[1].endswith(f":{port:04X}") and row[3] == "0A"]


def wait_until(condition, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_taken_port_is_passed_over() -> None:
    """A port of the kernel's choice: one that was free a moment ago may be another test's by now."""
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        assert free_port(port) > port
    assert free_port() >= FIRST_PORT


class Healthy(BaseHTTPRequestHandler):
    """Answers as another run's dashboard would."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_port_that_another_dashboard_takes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer((ADDRESS, 0), Healthy) as other:
        taken = other.server_address[1]
        threading.Thread(target=other.serve_forever).start()
        try:
            probe = dashboard_process.is_free
            monkeypatch.setattr(dashboard_process, "is_free", lambda port: port == taken or probe(port))
            with DashboardProcess(Store(tmp_path), taken) as asked, pytest.raises(DashboardError, match=f"port {taken}"):
                asked.ready()
            monkeypatch.setattr(dashboard_process, "free_port", lambda first=taken: free_port(first))
            with DashboardProcess(Store(tmp_path)) as process:
                url = process.ready()
                assert healthy(url)
                assert url != f"http://{ADDRESS}:{taken}"
        finally:
            other.shutdown()


def test_on_a_full_disk_its_output_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk of the store refuses must not keep people from looking at it."""
    monkeypatch.setattr("unskew.dashboard_process.sys.executable", "/bin/true")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with DashboardProcess(Store(tmp_path)) as process:
            process.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not process.log.is_relative_to(tmp_path)
    process.log.unlink()


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_serves_on_this_machine_only_and_dies_with_its_starter(end: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            url = starter.stdout.readline().strip()
            assert url.startswith(f"http://{ADDRESS}:")
            assert healthy(url), "an address is told when it answers"
            assert listening(int(url.rpartition(":")[2])) == ["0100007F"]
        finally:
            os.kill(starter.pid, end)
    assert wait_until(lambda: not healthy(url), 20)
