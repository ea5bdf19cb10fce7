"""Looking needs no writing: where a store cannot be written, what only reads works and the rest refuses in one sentence."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.store.store_contract import note, span
from typer.testing import CliRunner, Result

from unskew.cli import app
from unskew.collector.events import RunStarted
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.dashboard_process import DashboardProcess


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store(tmp_path / "store")
    started = RunStarted(run="r", device="d", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
    stream, writer = ControlStream(store, "r", "run/r", "controller"), SpoolWriter(store, "r", "rank-0000.1")
    stream.append(0, [started, note("x")], actor="controller")
    writer.append(span(1))
    assert writer.close()
    stream.close()
    shutil.rmtree(store.root / "locks")
    whole, access = os.open, os.access

    def open_(path: str | Path, flags: int, *rest: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(store.root)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return whole(path, flags, *rest, **more)

    def mkdir(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not mode & os.W_OK)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("command", [("sql", "select * from runs"), ("diagnose",), ("watch",)])
def test_who_looks_needs_no_right_to_write(command: tuple[str, ...], read_only: Store) -> None:
    result = call(*command, "--store", str(read_only.root))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--no-dashboard"), ("run", "--resume", "r"),
        ("import", "mlperf", "x"), ("store", "check"), ("store", "prune", "--telemetry-days", "1"),
        ("simulate",),
        ("alerts", "run", "--rules", "{rules}"),
    ],
    ids=lambda command: " ".join(command[:2]),
)  # fmt: skip
def test_who_writes_says_in_one_sentence_that_it_cannot(command: tuple[str, ...], read_only: Store, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.touch()
    result = call(*(word.format(rules=rules) for word in command), "--store", str(read_only.root))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"store {read_only.root} cannot be written here" in result.stderr


def test_the_dashboards_output_goes_elsewhere(read_only: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unskew.dashboard_process.sys.executable", "/bin/true")
    with DashboardProcess(read_only) as failed:
        assert not failed.log.is_relative_to(read_only.root)
        assert failed.wait() == 0
    failed.log.unlink()
    lasting = tmp_path / "lasting"
    lasting.write_text("#!/bin/sh\nexec sleep 60\n")
    lasting.chmod(0o700)
    monkeypatch.setattr("unskew.dashboard_process.sys.executable", str(lasting))
    with DashboardProcess(read_only) as process:
        assert process.log.exists()
    assert not process.log.exists(), "nothing is left of one that was ended"
