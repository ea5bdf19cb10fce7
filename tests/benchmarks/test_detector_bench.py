"""The benches of the Detector, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import dashboard_runs as runs

from unskew.benchmarks import detector_stated
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run


def test_a_slowdown_of_the_stated_size_is_named_and_none_where_nothing_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    runs.healthy(store, iterations=80).close()
    with open_store(store) as reader:
        log = load_run(reader, "healthy")
    found = detector_stated.injected(log, (44,))
    assert [one.rank for one in found] == [*range(8), None]
    assert all(one.stated is not None and one.named and not one.another for one in found)
    monkeypatch.setattr(detector_stated, "slowed", lambda one, _rank, _factor: one)
    assert not any(one.named for one in detector_stated.injected(log, (44,)))
