"""A webhook, a run's control stream, and waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.store.alerting import Hook, Log

from unskew.collector.alerts import delivery as alert_delivery
from unskew.collector.paths import Store


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(alert_delivery, "PAUSES_S", (0.01, 0.01))
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(Store(tmp_path))
    yield log
    log.stream.close()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait(done: Callable[[], bool], timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait
