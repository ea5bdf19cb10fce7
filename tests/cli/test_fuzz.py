"""Whatever is typed, a command ends with an exit code and a sentence: 300 invocations, made of the commands' own options."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import polars
import pytest
import typer
from support.store.store_contract import note, span
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.events import RunStarted
from unskew.collector.paths import Store
from unskew.collector.read import console, reader
from unskew.collector.read.reader import Reader
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.commands.train import run as run_command
from unskew.commands.train import watch as watch_command

INVOCATIONS = 300
WHOLE = ["-1", "0", "1", "7", str(2**31), str(2**70), "99999999999999999999", "1e3", "x", ""]
NUMBERS = [*WHOLE, "nan", "inf", "-inf", "1e9", "1e400", "0.5"]
TEXTS = [
    "", " ", "r1", "r9", "p1", "x" * 5000, "\x1b[31mred", "[/x]", "[bold]", "../..", "a\nb", "é", "\udcff", "%s{}", "=", ",",
    ":", "slow:rank=0,factor=1e308,at=1", "llama2-13b,dp=0", "llama2-70b,pp=99999999999999999999", "unskew,", "steady,1-=x",
    "rate=1e999", "trace:", "iteration-times", "flight-recorder", "prometheus", "kineto", "select 1 as \"[/x]\"; --", "auto",
]  # fmt: skip
NOT_HERE = {"dashboard", "bench", "study"}
"""They serve, measure or compute for minutes."""
RARE = {"check", "rebuild", "compact", "prune", "duckdb", "simulate"}
"""They work for a while on whatever they are given: the first rounds have them."""


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        elif name not in NOT_HERE:
            yield (*names, name), command


def words(command: Any, random_: random.Random, paths: list[str]) -> list[str]:
    """Most of a command's arguments, and some of its options, each with a value of its kind or of none."""
    found: list[str] = []
    for parameter in command.params:
        if parameter.name in ("store", "help") or random_.random() > (0.9 if parameter.required else 0.35):
            continue
        value = random_.choice(pool(parameter.type_descriptor.annotation, paths))
        if not parameter.opts[0].startswith("-"):
            found.append(value)
        else:
            found += [random_.choice(parameter.opts), *([] if parameter.is_flag else [value])]
    return found


def pool(kind: Any, paths: list[str]) -> list[str]:
    if kind is int:
        return WHOLE
    if kind is float:
        return NUMBERS
    return [*map(str, get_args(kind)), *(paths if kind is Path else paths[:3]), *TEXTS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for run in ("r1", "r2"):
        stream = ControlStream(store, run, f"run/{run}", "controller")
        started = RunStarted(run=run, device="sleep", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
        stream.append(0, [started, note("\x1b[31m[/x]")], actor="controller")
        stream.close()
        writer = SpoolWriter(store, run, "rank-0000.1")
        writer.append(span(1))
        writer.close()
    return store


class Kept(Reader):
    """One that stays open for the next command."""

    def close(self) -> None:
        pass


def places(tmp_path: Path) -> list[str]:
    """Paths that a person may name by mistake."""
    (tmp_path / "folder" / "empty").mkdir(parents=True)
    (tmp_path / "empty.json").touch()
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "list.json").write_text("[1, null, {}]")
    (tmp_path / "table.csv").write_text("step,time\n1,0.5\n2,x\n")
    (tmp_path / "dangling").symlink_to("/nowhere")
    names = ("folder", "empty.json", "garbage", "list.json", "table.csv", "dangling", "missing/x.json", "new.json")
    return [*(str(tmp_path / name) for name in names), "", ".", "/", "-", "/dev/full", "/dev/null", "/proc/nope/x", "x" * 300]


@pytest.mark.slow
@pytest.mark.limit(300)
def test_no_invocation_ends_in_a_traceback(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "perform", lambda *_, **__: None)
    monkeypatch.setattr(watch_command, "BEGINS_WITHIN_S", 0.0)
    # Opening a store, and a process for a query, take most of the time and see nothing of what was typed.
    kept = Kept(store)
    monkeypatch.setattr(reader, "open_store", lambda place: kept if place == store else Reader(place))
    monkeypatch.setattr(console, "query", lambda *_, **__: polars.DataFrame({"[/x]": ["\x1b[31m", None]}))
    random_, every, paths = random.Random(17), list(commands(typer.main.get_command(app))), places(tmp_path)
    failures = []
    for number in range(INVOCATIONS):
        some = every if number < 2 * len(every) else [one for one in every if one[0][-1] not in RARE]
        names, command = some[number % len(some)]
        typed = [*names, *words(command, random_, paths), "--store", str(random_.choice([store.root, tmp_path / "none"]))]
        result = CliRunner().invoke(app, typed)
        shutil.rmtree(tmp_path / "none", ignore_errors=True)  # what a simulation has written there: it is no store again
        broken = result.exception is not None and not isinstance(result.exception, SystemExit)
        if broken or result.exit_code not in (0, 1, 2) or (result.exit_code and not result.stderr.strip()):
            failures.append(f"{typed}: {result.exit_code} {result.exception!r} {result.stderr!r}")
    assert not failures, "\n".join(failures)
