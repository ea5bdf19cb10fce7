"""The recipes of README and docs/guide/own-trace.md work as they stand, in a clean folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from unskew.cli import app

TRACE = (ROOT / "docs" / "guide" / "own-trace.md").read_text()
README = (ROOT / "README.md").read_text()
JOB = """
import time
import torch
model = torch.nn.Linear(8, 8)
batches, n_tokens = [torch.ones(4, 8)] * 16, 32
def train_step(batch):
    loss = model(batch).sum()
    loss.backward()
    return loss
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def typed(page: str, beginning: str) -> list[str]:
    """The first command line of a page that begins so, without its comment."""
    line = next(line for line in page.splitlines() if line.startswith(f"    {beginning}"))
    return shlex.split(line, comments=True)[1:]


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "import_", "found"),
    [("profile", "unskew import kineto traces ", "12 iterations"), ("writerow", "unskew import iteration-times times", "16")],
)
def test_what_is_to_be_recorded_is_recorded_imported_and_diagnosed(
    block: str, import_: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = [one for one in blocks(TRACE) if block in one]
    subprocess.run([sys.executable, "-c", JOB + recipe], check=True, timeout=50)
    imported = typed(TRACE, import_)
    assert found in call(*imported)
    assert imported[-1] in call("diagnose", imported[-1])
    (reading,) = blocks(README)
    shown = subprocess.run([sys.executable, "-c", reading], check=True, timeout=50, capture_output=True, text=True).stdout
    assert imported[-1] in shown


@pytest.mark.slow
def test_the_policies_of_readmes_simulation_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = call(*typed(README, "unskew simulate"))
    (row,) = [line for line in shown.splitlines() if "effective training time" in line]
    _, resihp, unskew = re.findall(r"│\s+([^│]+?)\s+(?=│)", row)
    assert resihp != unskew
