"""A run with alerts on it: its control stream, a webhook that keeps what it got, and one evaluation."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from unskew.collector import events as ev
from unskew.collector.alerts.evaluation import Alerting, AlertTransition
from unskew.collector.alerts.rules import Rule
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.control_stream import ControlStream


def now_us() -> int:
    return time.time_ns() // 1000


SLOW = ev.Verdict(
    verdict=1, cause="slow_device", culprits=(ev.Party(kind="device", rank=0),), since_iteration=1, at_iteration=2,
    confidence=0.9, sentence="rank 0 is slow", evidence={},
)  # fmt: skip


class Hook:
    """A webhook on the loopback that answers `status` and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.slow_s = 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(hook.slow_s)
                self.send_response(hook.status)
                for header in hook.headers.items():
                    self.send_header(*header)
                self.end_headers()

            def do_GET(self) -> None:
                hook.got.append({"phase": "GET", "subject": self.path})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/alert"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def phases(self) -> list[tuple[str, str]]:
        return [(message["phase"], message["subject"]) for message in self.got]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Log:
    """The control stream of a run with two ranks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stream = ControlStream(store, "r", "control", "controller.1")
        started = ev.RunStarted(run="r", device="d", clock="monotonic", mode="auto", ranks=2, options={}, code="", version="")
        self.add(started, *(ev.DeviceJoined(device=f"d{rank}", rank=rank, node="n", pid=1) for rank in range(2)))

    def add(self, *events: ev.Control) -> None:
        self.stream.append(self.stream.version, events, actor="c")


def step(store: Store, *rules: Rule, at_us: int | None = None) -> list[AlertTransition]:
    """One evaluation by a process of its own making, to the end of its deliveries."""
    alerting = Alerting(store, rules)
    try:
        return alerting.step(at_us or now_us())
    finally:
        alerting.close()


def deliveries(store: Store) -> list[tuple[object, ...]]:
    with open_store(store) as reader:
        return reader.sql("select phase, ok, tries from alert_deliveries order by seq").rows()
