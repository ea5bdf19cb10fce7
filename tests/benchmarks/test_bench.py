"""The frame of the benchmarks: what counts as reaching a bar, and the JSON that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

import unskew
from unskew.benchmarks import kept
from unskew.benchmarks.growth import draw_growth
from unskew.benchmarks.registry import BENCHES, parts_of
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench, Part
from unskew.cli import app
from unskew.collector.paths import Store


def demo(_bench: Bench) -> list[Figure]:
    return [figure("regroup", 0.7, "s", bar=0.5, better="lower", note="8 ranks")]


def storing(bench: Bench) -> list[Figure]:
    (bench.store.root / "run").write_text("kept")
    print(bench.store.root)
    return []


def add(monkeypatch: pytest.MonkeyPatch, name: str, part: Part) -> None:
    """A bench of one part, in a module of its own."""
    module = ModuleType(name)
    setattr(module, "figures", part)  # noqa: B010  # a module has no such attribute
    monkeypatch.setitem(sys.modules, f"unskew.benchmarks.{name}", module)
    monkeypatch.setitem(BENCHES, name, (f"{name}.figures",))


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_the_parts_that_are_listed(name: str) -> None:
    assert all(map(callable, parts_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("a-typo", 2), ("liveness", 0)])
def test_a_bench_imports_no_other(name: str, code: int) -> None:
    """The measuring itself is left out."""
    script = f"""
import sys
from unskew.benchmarks import registry, runs
runs.perform = lambda *_, **__: None
from rich.progress import Progress
from typer.testing import CliRunner
from unskew.cli import app
from unskew.collector.paths import Store
assert CliRunner().invoke(app, ["bench", {name!r}]).exit_code == {code}
modules = {{part.rpartition(".")[0] for parts in registry.BENCHES.values() for part in parts}}
print(*sorted(one for one in modules if "unskew.benchmarks." + one in sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ([f"loop.{name}"] if code == 0 else [])


@pytest.mark.parametrize(
    ("value", "bar", "better", "ok"),
    [
        (0.5, 0.5, "lower", True),
        (0.6, 0.5, "lower", False),
        (20, 19, "higher", True),
        (None, 1, "higher", None),
        (1, None, "lower", None),
    ],
)
def test_a_bar_is_met_by_reaching_it(value: float | None, bar: float | None, better: str, ok: bool | None) -> None:
    assert figure("f", value, "s", bar=bar, better=better).ok is ok  # type: ignore[arg-type]


def test_a_bench_writes_its_figures_and_a_missed_bar_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "demo", demo)
    monkeypatch.setattr(sys, "argv", ["unskew", "bench", "demo"])
    result = CliRunner().invoke(app, ["bench", "demo", "--json", str(tmp_path / "out" / "demo.json")])
    assert result.exit_code == 0, result.output
    assert "missed" in result.output
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert (report["bench"], report["command"]) == ("demo", "unskew bench demo")
    assert {"processor", "cores", "memory", "date", "torch"} <= set(report["machine"])
    entry = {"name": "regroup", "value": 0.7, "unit": "s", "bar": 0.5, "better": "lower", "ok": False, "note": "8 ranks"}
    assert report["figures"] == [entry]


def test_a_part_of_a_bench_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "demo", demo)
    monkeypatch.setitem(BENCHES, "two", ("demo.figures", "not.there.figures"))
    result = CliRunner().invoke(app, ["bench", "two", "--part", "demo"])
    assert result.exit_code == 0, result.output
    assert "regroup" in result.output
    result = CliRunner().invoke(app, ["bench", "two", "--part", "a-typo"])
    assert (result.exit_code, result.stderr) == (2, "--part 'a-typo' is no part of two, allowed: demo, there\n")


def test_a_bench_that_keeps_runs_keeps_them_in_the_store_asked_for_or_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, "storing", storing)
    result = CliRunner().invoke(app, ["bench", "storing", "--store", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "store" / "run").read_text() == "kept"
    result = CliRunner().invoke(app, ["bench", "storing"])
    assert result.exit_code == 0, result.output
    assert not Path(result.stdout.splitlines()[0]).exists()


def test_the_growth_of_the_planning_time_is_drawn(tmp_path: Path) -> None:
    times = [
        figure(f"a full plan for {devices:,} devices", seconds, "s", bar=60.0, better="lower")
        for devices, seconds in ((64, 0.03), (98_304, 12.5))
    ]
    another = figure("another", 1.0, "s", better="lower")
    page = draw_growth([another, *times], tmp_path / "a.json")
    assert page is not None
    assert page.name == "a.growth.html"
    assert "98304" in page.read_text()
    assert draw_growth([another], tmp_path / "b.json") is None


def test_where_benches_are_not_installed_one_sentence_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unskew.benchmarks")
    monkeypatch.setattr(unskew, "__path__", [])
    monkeypatch.delattr(unskew, "benchmarks")
    result = CliRunner().invoke(app, ["bench", "loop"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "benches are not installed: run them from a checkout of the repository, with make bench\n"


def test_a_bench_that_was_interrupted_measures_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(seed: int) -> list[int]:
        if seed == 2 and len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(seed)
        return [seed]

    def measured(what: str = "trainings") -> list[list[int]]:
        with Progress() as progress:
            return Bench(progress, Store(tmp_path)).kept(what, range(3), measure, list[int])

    with pytest.raises(KeyboardInterrupt):
        measured()
    with (tmp_path / "measured.jsonl").open("ab") as torn:
        torn.write(b'\n{"code": "')  # as a kill in the midst of a line leaves it
    asked.clear()
    assert measured() == [[0], [1], [2]]
    assert asked == [2]
    measured()
    assert asked == [2]
    measured("others")
    assert asked == [2, 0, 1, 2]
    monkeypatch.setattr(kept, "code_digest", lambda: "of another version")
    measured("others")
    assert asked == [2, 0, 1, 2, 0, 1, 2]
