"""What the log's commands say to a newcomer: what is allowed, what is wrong, what is empty."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unskew.analytics.lab.baselines.registry import METHODS
from unskew.cli import app
from unskew.collector.events import RunStarted
from unskew.collector.files.manifest import Manifest, publish
from unskew.collector.files.segment import segment_name
from unskew.collector.formats.registry import EXPORTERS, IMPORTERS
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream

PROBLEM = "run r1: writer rank-0000.1 lacks 3 lines"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def holed(tmp_path: Path) -> Store:
    """A store with one run, in whose log the collector found a hole."""
    store = Store.locate(tmp_path)
    stream = ControlStream(store, "r1", "control", "controller.1")
    started = RunStarted(run="r1", device="sleep", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
    stream.append(0, [started], actor="controller")
    stream.close()
    publish(store, Manifest(problems=(PROBLEM,)))
    return store


@pytest.mark.parametrize(("command", "known"), [("import", IMPORTERS), ("export", EXPORTERS), ("backtest", METHODS)])
def test_the_help_names_all_that_is_allowed(command: str, known: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = call(command, "--help").output
    assert [name for name in known if name not in shown] == []


@pytest.mark.parametrize(
    "arguments", [("replay", "r1"), ("backtest", "r1", "--detector", "nvrx"), ("export", "prometheus", "r1", "--out", "f")]
)
def test_a_mistyped_store_is_not_taken_for_one_without_runs(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = call(*arguments, "--store", str(tmp_path / "none"))
    assert (result.exit_code, result.stderr) == (2, f"there is no store in {tmp_path / 'none'}\n")


def test_a_hole_in_the_log_is_told_beside_what_is_made_of_it(holed: Store, tmp_path: Path) -> None:
    out = str(tmp_path / "f")
    for arguments in (["replay", "r1"], ["backtest", "r1", "--detector", "nvrx"], ["export", "prometheus", "r1", "--out", out]):
        assert call(*arguments, "--store", str(holed.root)).stderr.splitlines()[0] == f"warning: {PROBLEM}", arguments


def test_a_folder_in_the_place_of_a_spool_file_is_named_in_one_sentence(holed: Store) -> None:
    folder = holed.spool("r1") / "w" / segment_name(0)
    folder.mkdir(parents=True)
    result = call("store", "check", "--store", str(holed.root))
    assert (result.exit_code, result.stderr) == (1, f"{folder}: Is a directory\n")


def test_a_file_that_may_not_be_written_is_named_in_one_sentence(holed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root nothing is forbidden, so the refusal is made here."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", f"{holed.root}/locks/alerts")

    monkeypatch.setattr("unskew.collector.alerts.process.serve", forbidden)
    rules = holed.root / "rules.toml"
    rules.write_text('webhook = "http://127.0.0.1:9/x"\n[[rule]]\nwhen = "death"\n')
    result = call("alerts", "run", "--once", "--rules", str(rules), "--store", str(holed.root))
    assert (result.exit_code, result.stderr) == (1, f"{holed.root}/locks/alerts: Permission denied\n")


def test_a_store_without_any_event_is_not_praised(tmp_path: Path) -> None:
    result = call("store", "check", "--store", str(tmp_path))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "the store is empty: it holds the log of no run")


def test_a_file_without_rules_says_so(holed: Store) -> None:
    (holed.root / "alerts.toml").touch()
    result = call("alerts", "check", "--store", str(holed.root))
    assert (result.exit_code, result.stdout) == (0, f"{holed.root / 'alerts.toml'} has no rules: nothing can open\n")


def test_a_list_is_shown_as_one(holed: Store) -> None:
    assert "[64, 64]" in call("sql", "select [64, 64] as lengths", "--store", str(holed.root)).stdout


def test_a_long_word_is_shown_whole(holed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = call("sql", "select repeat('x', 300) as word, 1 as one", "--store", str(holed.root)).stdout
    assert (shown.count("x"), "…" in shown) == (300, False)
