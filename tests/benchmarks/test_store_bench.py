"""The log's benchmark measures what it says: every part of it once, small, with figures that a broken store would fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from unskew.benchmarks.runs import Bench
from unskew.benchmarks.store import answers, faults, ingest, processes, queries
from unskew.collector.files.manifest import load
from unskew.collector.paths import Store
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.read.views import VIEWS
from unskew.collector.service import check

pytestmark = pytest.mark.slow
BENCH = Bench(Progress(), Store(Path("never-used")))
COMPARED = ("events", "spans", "runs", "iterations", "judged", "rollups", "writers", "health")
"""Views over all that is stored; the bench itself compares every view."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two producers instead of eight, and answers of the views alone that read another file each."""
    for module in (ingest, processes, faults):
        monkeypatch.setattr(module, "PRODUCERS", 2)
    assert all(any(f"projected.{name}" in VIEWS[view] for view in COMPARED) for name in PROJECTIONS)
    monkeypatch.setattr(faults, "VIEWS", {view: VIEWS[view] for view in COMPARED})


@pytest.mark.limit(300)
def test_every_figure_of_ingest_is_measured_beside_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "SQLITE", 4000)
    figures = ingest.figures(BENCH, flat_out=8000, backlog=8000, fresh_s=1.0, loop=1000, sealed=64_000)
    values = {figure.name.removeprefix("store: "): figure.value for figure in figures}
    assert all(value is not None and value > 0 for value in values.values()), values
    assert [figure.name for figure in figures if "SQLite json" in figure.note] == [
        "store: 8 producers flat out, end to end",
        "store: a span of the producers, sealed",
    ]
    assert 0 < (values["a sealed span"] or 0) <= 12
    assert "10,000 seen of 10,000 events" in next(figure.note for figure in figures if "reader's view" in figure.name)


@pytest.mark.limit(300)
def test_kills_under_load_lose_no_event_and_no_decision(tmp_path: Path) -> None:
    lost, doubled = faults.killed(BENCH, Store(tmp_path / "store"), 2)
    assert (lost.value, doubled.value) == (0, 0), lost.note
    assert ", 0 of them decisions" not in lost.note


@pytest.mark.limit(120)
def test_damage_counts_as_noticed_only_when_it_is_named_or_truly_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    faults._portions(store)
    truth = {True: faults._database_answers(store), False: faults._answers(store)}

    def noticed(file: Path) -> bool:
        whole = file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(whole[:3000] + b"damaged" + whole[3007:] if file == store.database else whole[:-9] + b"012345678")
        found = faults._noticed(store, tmp_path / "kept", truth)
        file.write_bytes(whole)
        return found

    now = load(store)
    for name in (now.sealed[0].file, "store.duckdb", "manifest.json"):
        assert noticed(store.root / name), name
    monkeypatch.setattr(check, "publish", lambda *_: None)
    monkeypatch.setattr(check, "write_snapshot", lambda *_: None)
    assert not noticed(store.root / now.published[-1].file), "it was said to be mended, and was not"
    monkeypatch.setattr(check, "_difference", lambda *_: None)
    assert not noticed(store.database)


@pytest.mark.limit(300)
def test_the_benchmark_asks_a_store_that_grows_and_sqlite_alike() -> None:
    *figures, memory = queries.figures(BENCH, sizes=[20_000], rounds=1)
    assert len(figures) == 3
    assert all(figure.value is not None and figure.value > 0 and "SQLite, json" in figure.note for figure in figures)
    assert memory.ok


@pytest.mark.limit(300)
def test_a_person_s_first_query_sees_what_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "COMMANDS", (("diagnose", "big"),))
    monkeypatch.setattr(answers, "WARM_UP_S", 0.0)
    monkeypatch.setattr(answers, "OPENING_S", 0.1)
    first, age, took, memory = answers.figures(BENCH, spans=20_000, openings=3)
    assert (first.bar, took.bar, memory.bar) == (300, 5, 1000)
    assert 0 < (age.value or 0) < 600, "no event had come into store.duckdb"
    assert memory.ok


@pytest.mark.limit(300)
def test_a_kill_in_the_midst_of_each_part_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "WORKS", {"collect": ("seal", "publish")})  # each part takes eight seconds
    (wrong,) = faults.aimed(BENCH, tmp_path, kills=1)
    assert wrong.value == 0, wrong.note
    assert "1 seal, 1 publish" in wrong.note
