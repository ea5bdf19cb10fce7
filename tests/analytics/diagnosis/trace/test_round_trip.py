"""A run of ours that goes out in another tool's format and comes back is diagnosed as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training.runtime_runs import SMALL, Run, train

from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose
from unskew.collector.formats.registry import bring_in, take_out
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

pytestmark = [pytest.mark.limit(180), pytest.mark.slow]
SLOW, SINCE = 2, 14


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """`slow`: rank 2 takes 1.8 times as long from iteration 14 on."""
    fault = f"slow:rank={SLOW},factor=1.8,at={SINCE}"
    return {
        name: train(tmp_path_factory.mktemp(name), *faults, base=SMALL, mode="observe", iterations=40, micro_batches=8)
        for name, faults in (("slow", [fault]), ("healthy", []))
    }


def back(run: Run, format: str, folder: Path) -> Diagnosis:
    take_out(run.store, format, run.id, folder / "out")
    store = Store.locate(folder / "store")
    (imported,) = bring_in(store, format, folder / "out")
    with open_store(store) as reader:
        return diagnose(load_run(reader, imported.run))


@pytest.mark.parametrize("format", ["straggler-analysis", "kineto"])
def test_the_slow_rank_is_named_from_when_it_was_slow(runs: dict[str, Run], format: str, tmp_path: Path) -> None:
    found = back(runs["slow"], format, tmp_path)
    assert found.observability == "chunks"
    (verdict,) = [verdict for verdict in found.verdicts if verdict.cause == "slow_device"]
    assert [party.rank for party in verdict.culprits] == [SLOW]
    assert abs(verdict.since_iteration - SINCE) <= 2
    assert found.time_lost_s["slow_device"] > found.time_lost_s["long_sequences"]


@pytest.mark.parametrize("format", ["straggler-analysis", "kineto"])
def test_nobody_is_named_in_a_healthy_run(runs: dict[str, Run], format: str, tmp_path: Path) -> None:
    found = back(runs["healthy"], format, tmp_path)
    assert found.observability == "chunks"
    assert [verdict for verdict in found.verdicts if verdict.cause == "slow_device"] == []
