"""The recorded run that ships with Unskew: what is in it is found, and showing it writes nothing beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unskew
from unskew import dashboard_process
from unskew.cli import app
from unskew.collector.paths import Store
from unskew.data import DEMO


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_its_diagnosis_names_the_ranks_that_were_slowed_and_killed(tmp_path: Path) -> None:
    store = shutil.copytree(DEMO, tmp_path / "demo")  # a diagnosis is written to the log
    with unskew.open(store) as log:
        injected = log.sql("select payload->>'kind', (payload->>'rank')::int from events where type like 'fault_injected@%'")
        (ended,) = log.runs().iter_rows(named=True)
    answer = tmp_path / "answer.json"
    result = CliRunner().invoke(app, ["diagnose", "--store", str(store), "--json", str(answer)])
    assert result.exit_code == 0, result.output
    found = {(cause["cause"], party["rank"]) for cause in causes(answer) for party in cause["culprits"] if "rank" in party}
    assert found == {({"slow": "slow_device", "kill": "dead"}[kind], rank) for kind, rank in injected.iter_rows()}
    assert len(found) == 2
    assert (ended["status"], ended["n_dropped"]) == ("done", 0)


@pytest.mark.slow
def test_it_replays_as_it_was_decided() -> None:
    """A change of what is decided records it anew: `make demo`."""
    (run,) = [path.name for path in (DEMO / "sealed").iterdir()]
    result = CliRunner().invoke(app, ["replay", run, "--store", str(DEMO)])
    assert result.exit_code == 0, result.output
    assert " recorded decisions compared, 0 different" in result.stdout


def causes(answer: Path) -> list[dict[str, Any]]:
    (found,) = json.loads(answer.read_text())["runs"]
    return list(found["verdicts"])


def test_the_dashboard_shows_a_copy_that_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Path] = []

    class Shown:
        def __init__(self, store: Store, _port: int | None) -> None:
            assert files(store.root) == files(DEMO)
            shown.append(store.root)

        def __enter__(self) -> Shown:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ready(self) -> str:
            return "http://address"

        def wait(self) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(dashboard_process, "DashboardProcess", Shown)
    monkeypatch.setattr("unskew.commands.train.dashboard.as_ctrl_c", lambda: None)
    result = CliRunner().invoke(app, ["dashboard", "--demo"])
    (run,) = [path.name for path in (DEMO / "sealed").iterdir()]
    assert f"http://address/?run={run} " in result.stdout
    assert not shown[0].exists()
    assert CliRunner().invoke(app, ["dashboard", "--demo", "--store", "x"]).exit_code == 2
