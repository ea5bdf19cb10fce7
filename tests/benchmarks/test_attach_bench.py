"""The benchmark of watched trainings measures what it says: each part once, small."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress
from support.training.warm_processes import warm_process

from unskew.benchmarks.attach import grid, kills, overhead, probes, recorded
from unskew.benchmarks.runs import Bench
from unskew.collector.paths import Store

pytestmark = pytest.mark.slow
BENCH = Bench(Progress(), Store(Path("never-used")))


def run(command: Sequence[str], **options: Any) -> Any:
    """As `subprocess.run`; a script is forked from a process that has imported torch."""
    _, file, *arguments = command
    if not file.endswith(".py"):
        return subprocess.run(command, **options)  # noqa: PLW1510
    code, printed = warm_process().run_script(file, *arguments)
    assert code == 0, printed
    return None


@pytest.fixture(autouse=True)
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grid, overhead, probes):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run}))


@pytest.mark.limit(240)
def test_both_halves_of_a_turn_are_measured_for_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "MICRO_BATCHES", 1)
    for job, width in (("LIGHT", 8), ("HEAVY", 9)):
        monkeypatch.setattr(overhead, job, overhead.LoopSize(5, 1, width, 4, 1))
    one, several, of_step, wall, start, *baselines = overhead.figures(BENCH, turns=1, wall_turns=1)
    assert [figure.bar for figure in (one, several, of_step, wall, start)] == [20, 20, 0.3, 1, 50]
    assert all(figure.value is not None for figure in (one, several, of_step, wall, start))
    assert "ms: median" in wall.note
    for baseline, (module, packages) in zip(baselines, overhead.BASELINES.values(), strict=True):
        assert baseline.value is not None if find_spec(module) else f"pip install {packages}" in baseline.note


@pytest.mark.limit(240)
def test_a_watched_job_whose_rank_is_killed_leaves_a_whole_log_and_no_process() -> None:
    *figures, gone_s = kills.figures(BENCH, kills=1, victims=("rank 1",))
    assert [figure.value for figure in figures] == [0, 0, 0, 0], figures
    assert 0 < (gone_s.value or 0) < kills.LEFT_S


@pytest.mark.limit(240)
def test_recorded_jobs_are_judged_again() -> None:
    named, delay, _, accused, *_ = recorded.figures(BENCH, every=6)
    assert (named.value, accused.value) == (100, 0)
    assert (delay.value or 0) <= 10


@pytest.mark.limit(240)
def test_watched_jobs_count_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LATE", ("forward",))
    monkeypatch.setattr(probes, "EVEN", ("random",))
    named, delay, _, _, _, *baselines = probes.figures(BENCH, seeds=1)
    assert named.value == 100
    assert 6 <= (delay.value or 0) < 32
    assert [figure.name.rsplit(" ", 1)[1] for figure in baselines] == ["nvrx", "traceml"]
    assert all("of 2 jobs without a late rank" in figure.note for figure in baselines)


@pytest.mark.limit(240)
def test_a_job_under_another_framework_counts_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "LATE", ("backward",))
    monkeypatch.setattr(grid, "EVEN", ())
    monkeypatch.setattr(grid, "ENDS", {})
    named, delay, accused, longer, *_ = grid.figures(BENCH, seeds=1, frameworks=("fsdp2",))
    assert (named.value, accused.value, longer.value) == (100, 0, 100)
    assert 6 <= (delay.value or 0) < 32
