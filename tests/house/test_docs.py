"""The documentation names every command, option and choice, and its links lead somewhere."""

from __future__ import annotations

import doctest
import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import typer
from support.paths import ROOT

from unskew.cli import app
from unskew.collector.formats.registry import bring_in
from unskew.collector.paths import Store

FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    assert f"unskew {name}" in TEXT
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--") and option != "--help":
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", TEXT), f"{option} of unskew {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_whoever_adds_something_finds_every_file_that_is_named() -> None:
    names = re.findall(r"`([\w./]+/[\w./]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 30
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("package", ["analytics", "collector", "runtime/rank"])
def test_examples_in_docstrings_give_what_they_say(package: str) -> None:
    files = [file for file in (ROOT / package).rglob("*.py") if ">>> " in file.read_text()]
    assert files
    for file in files:
        name = ".".join(("unskew", *file.relative_to(ROOT).with_suffix("").parts))
        assert doctest.testmod(import_module(name)).failed == 0, name


def test_the_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert "make run" in opening
    assert "make test" in opening
    assert "docs/dashboard.png" in opening


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "store").mkdir(parents=True)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.slow
def test_what_the_page_on_own_traces_records_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_loop = {"rank": 0, "batches": range(16), "n_tokens": 7, "train_step": math.sin}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "own-trace.md").read_text(), re.DOTALL):
        exec(compile(block, "own-trace.md", "exec"), dict(own_loop))
    for form, path, iterations in (("kineto", "traces", 12), ("iteration-times", "times.csv", 16)):
        (stored,) = bring_in(Store(tmp_path / "store"), form, tmp_path / path)
        assert stored.iterations == iterations
