"""A run of ours that goes out in another tool's format and comes back is diagnosed as it was."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import SMALL, Run, light, train

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.collector.formats.registry import bring_in, take_out
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run
from unskew.runtime.options import RunOptions

pytestmark = [pytest.mark.limit(180), pytest.mark.slow]
SLOW, SINCE, SEEDS = 2, 14, (0, 1, 2)
FORMATS = ["straggler-analysis", "kineto"]
LIGHT = light(SMALL)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 2 takes 1.8 times as long from iteration 14 on."""
    return trained(tmp_path_factory.mktemp("slow"), f"slow:rank={SLOW},factor=1.8,at={SINCE}")


@pytest.fixture(scope="module")
def slow_member(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two groups of two; rank 1 takes twice as long from iteration 14 on, and rank 0 waits for it within its chunks."""
    groups = msgspec.structs.replace(SMALL, tp=2, pp=1, heads=2)
    return trained(tmp_path_factory.mktemp("member"), f"slow:rank=1,factor=2,at={SINCE}", base=groups)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return [trained(tmp_path_factory.mktemp("healthy"), seed=seed) for seed in SEEDS]


def trained(folder: Path, *faults: str, seed: int = 0, base: RunOptions = LIGHT) -> Run:
    return train(folder, *faults, base=base, mode="observe", iterations=40, micro_batches=8, tokens=128, seed=seed)


def back(run: Run, format: str, folder: Path) -> RunLog:
    take_out(run.store, format, run.id, folder / "out")
    store = Store.locate(folder / "store")
    (imported,) = bring_in(store, format, folder / "out")
    return log_of(store, imported.run)


def log_of(store: Store, run: str) -> RunLog:
    with open_store(store) as reader:
        return load_run(reader, run)


@pytest.mark.parametrize("format", FORMATS)
def test_the_slow_rank_is_named_from_when_it_was_slow(slow: Run, format: str, tmp_path: Path) -> None:
    found = diagnose(back(slow, format, tmp_path))
    assert (found.observability, found.outcome) == ("chunks", "wrong")
    (verdict,) = [verdict for verdict in found.verdicts if verdict.cause == "slow_device"]
    assert [party.rank for party in verdict.culprits] == [SLOW]
    assert abs(verdict.since_iteration - SINCE) <= 2
    assert found.time_lost_s["slow_device"] > found.time_lost_s["long_sequences"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_slow_member_of_a_group_is_named_and_not_who_waits_for_it(slow_member: Run, format: str, tmp_path: Path) -> None:
    found = diagnose(back(slow_member, format, tmp_path))
    accused = [verdict for verdict in found.verdicts if verdict.cause in {"slow_device", "unknown"}]
    assert [[party.rank for party in verdict.culprits] for verdict in accused] == [[1]]
    assert abs(accused[0].since_iteration - SINCE) <= 2


@pytest.mark.parametrize("number", range(len(SEEDS)))
@pytest.mark.parametrize("format", FORMATS)
def test_a_healthy_run_is_well_there_and_back(healthy: list[Run], format: str, number: int, tmp_path: Path) -> None:
    """The lengths of documents go along: by them unequal micro-batches are no fault, as in the run itself."""
    run = healthy[number]
    assert diagnose(log_of(run.store, run.id)).outcome == "well"
    log = back(run, format, tmp_path)
    found = diagnose(log)
    assert (found.observability, found.outcome) == ("chunks", "well"), found.why
    assert [(verdict.cause, verdict.evidence["lengths"]) for verdict in found.verdicts] == [("long_sequences", "logged")]
    blind = diagnose(msgspec.structs.replace(log, works={}))
    assert blind.outcome != "well", "by the times alone it was not known whose fault they are"


@pytest.mark.parametrize("format", FORMATS)
def test_what_comes_back_goes_out_again_with_its_lengths(healthy: list[Run], format: str, tmp_path: Path) -> None:
    run = healthy[0]
    first = back(run, format, tmp_path)
    store = Store.locate(tmp_path / "store")
    with open_store(store) as reader:
        (imported,) = reader.sql("select run from runs")["run"].to_list()
    take_out(store, format, imported, tmp_path / "again")
    (again,) = bring_in(store, format, tmp_path / "again", "again")
    assert log_of(store, again.run).works == first.works
