"""What stands in a log, or in a file of anywhere, is shown and never obeyed; what does not come is told."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from unskew.cli import app
from unskew.collector.events import Note, RunStarted
from unskew.collector.files.manifest import Manifest, publish
from unskew.collector.files.tail import Entry
from unskew.collector.locks import hold
from unskew.collector.paths import Store
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.commands.afterwards import replay
from unskew.commands.common import starting
from unskew.terminal import live
from unskew.terminal.console import SafeConsole
from unskew.terminal.safe_text import MOST, harmless

ORDERS = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202eback\r"
SHOWN = "␛[31mred␛]0;title␇\ufffd2J\ufffdback␍"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def started(run: str) -> RunStarted:
    return RunStarted(run=run, device="d", device_kind="sleep", clock="monotonic", mode="auto", ranks=1, options={}, code="",
                      version="0")  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    stream = ControlStream(store, "r", "run/r", "controller")
    stream.append(0, [started("r"), Note(text=ORDERS + "y" * 3 * MOST, by="[/x]")], actor="controller")
    stream.close()
    publish(store, Manifest(problems=(f"run r: {ORDERS}",)))
    return store


def test_orders_to_the_terminal_are_shown_and_long_texts_cut() -> None:
    assert harmless(ORDERS) == SHOWN
    assert harmless("a\n\té€", 9) == "a\n\té€"
    assert harmless("x" * (MOST + 1)).endswith("x… (2,001 characters)")


@pytest.mark.parametrize(
    "command",
    [
        ("watch", "r"),
        ("sql", "select payload->>'text' as \"[/x]\", type as \"x[a]\" from events where type like 'note%'"),
        ("watch", ORDERS),
        ("import", ORDERS, "x"),
    ],
    ids=["watch", "sql", "run", "format"],
)
def test_no_command_passes_orders_on(command: tuple[str, ...], store: Store) -> None:
    result = call(*command, "--store", str(store.root))
    assert SHOWN[:10] in result.output.replace("\n", "")
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.output)
    if command[0] == "sql":
        assert "[/x]" in result.stdout
        assert "x[a]" in result.stdout


def test_a_replay_passes_no_orders_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(differences=[SimpleNamespace(sentence=ORDERS)], same_code=True, compared=1)
    monkeypatch.setattr("unskew.edge.recorded_run.recorded_run", lambda *_: None)
    monkeypatch.setattr("unskew.analytics.replay.replay.replay", lambda *_: found)
    monkeypatch.setattr(replay, "facts", lambda _: {})
    monkeypatch.setattr(replay, "sentences", lambda _: [ORDERS])
    result = call("replay", "r", "--store", str(store.root))
    assert (result.exit_code, result.stdout.count(SHOWN)) == (1, 2)


def test_a_console_passes_its_own_colours_and_nobody_elses() -> None:
    file = io.StringIO()
    SafeConsole(file=file, force_terminal=True, color_system="standard").print(f"[bold]{ORDERS}[/]")
    assert file.getvalue().startswith("\x1b[1m␛")


def test_a_log_that_does_not_change_is_told_once_and_again_after_news(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now_s = io.StringIO(), [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now_s[0])
    with live.Screen(SafeConsole(file=file, width=200), []) as screen:
        screen.feed(Entry("controller", 0, 1, 0, "run/r", 1, "controller", started("r"), b""))
        for seconds in (59.0, 2.0, 30.0):
            now_s[0] += seconds
            screen.tick()
        assert (file.getvalue().count(live.SILENT), screen.state.silent) == (1, True)
        screen.heard()
        screen.tick()
        assert not screen.state.silent
        screen.heard(ago_s=61.0)
        screen.tick()
        assert file.getvalue().count(live.SILENT) == 2


def test_watch_shows_the_run_that_goes_on_rather_than_the_newest_in_the_log(store: Store) -> None:
    for run in ("early", "late"):
        stream = ControlStream(store, run, f"run/{run}", "controller")
        stream.append(0, [started(run)], actor="controller")
        stream.close()
    held = hold_controller_lock(store, "early")
    shown = []

    def end(_: live.Screen, alive: bool) -> None:
        shown.append(alive)
        held.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.Screen, "controlled", end)
        assert "early on 1 rank," in call("watch", "--store", str(store.root)).stdout
    assert shown[0]
    assert "late on 1 rank," in call("watch", "--store", str(store.root)).stdout


def test_watch_waits_for_a_run_that_is_about_to_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = hold(starting(store))
    assert begun is not None
    waited = []

    def sleep(_seconds: float) -> None:
        waited.append(1)
        begun.release()

    monkeypatch.setattr("unskew.commands.train.watch.time.sleep", sleep)
    assert call("watch", "--store", str(store.root)).exit_code == 0
    assert waited


def test_an_export_goes_to_stdout_of_the_newest_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("export", "prometheus", "--out", "-", "--store", str(store.root))
    assert (result.exit_code, result.stdout[:16], (tmp_path / "-").exists()) == (0, "# HELP unskew_ru", False)
    assert call("export", "parquet", "--out", "-", "--store", str(store.root)).exit_code == 2
