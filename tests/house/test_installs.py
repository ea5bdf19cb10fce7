"""What each part needs to be installed: a training rank little, so that it fits beside any trainer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.paths import ROOT

WRITER = ("unskew.collector.events", "unskew.collector.write.spool", "unskew.collector.write.control_stream")
NODE = ("unskew.runtime.node.agent", "unskew.runtime.node.zygote", "unskew.runtime.rank.rank")
COMMAND = "import sys; sys.argv = ['unskew', 'sql', 'select 1', '--store', '.']; from unskew.__main__ import main; main()"


def closure(name: str) -> set[str]:
    """A distribution and all that its installation brings with it."""
    found, open_ = set[str](), [name]
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            needed = [Requirement(line) for line in distribution(name).requires or ()]
            open_ += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def python_with_only(folder: Path, *distributions: str, code: str) -> subprocess.CompletedProcess[str]:
    """`code` where the standard library, ourselves, and these distributions with all they need can be imported."""
    for one in {name for of in distributions for name in closure(of)}:
        for top in {file.parts[0] for file in distribution(one).files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(distribution(one).locate_file(top)))
    path = {"PYTHONPATH": f"{folder}:{ROOT / 'src'}"}
    return subprocess.run([sys.executable, "-S", "-c", code], env=path, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "installed"), [(WRITER, ["msgspec"]), (NODE, ["msgspec", "numpy", "torch"])], ids=["writer", "rank"]
)
def test_who_writes_events_needs_msgspec_and_a_rank_numpy_and_torch_besides(
    modules: tuple[str, ...], installed: list[str], tmp_path: Path
) -> None:
    ended = python_with_only(tmp_path, *installed, code=f"import {', '.join(modules)}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_controller_of_our_own_model_needs_no_torch(tmp_path: Path) -> None:
    platform = ["duckdb", "msgspec", "numpy", "polars", "pyarrow", "scipy"]
    ended = python_with_only(tmp_path, *platform, code="import unskew.runtime.control.launch")
    assert ended.returncode == 0, ended.stderr


def test_the_lock_has_a_hash_for_all_that_a_run_needs_in_the_tested_versions() -> None:
    locked = {}
    for entry in re.split(r"\n(?=\w)", (ROOT / "requirements.lock").read_text())[1:]:
        name, version = re.match(r"([\w.-]+)==([^ ]+)", entry).groups()  # type: ignore[union-attr]
        assert "--hash=sha256:" in entry, name
        locked[canonicalize_name(name)] = version
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    assert {name: version for name, version in locked.items() if tested.get(name, version) != version} == {}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {canonicalize_name(Requirement(line).name) for extra in ("platform", "trainer") for line in extras[extra]}
    assert needed <= locked.keys()
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", "run", "LOCKED=1"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    installs = [line for line in commands.splitlines() if "pip install" in line]
    assert [("--require-hashes" in line, "--no-deps" in line) for line in installs] == [(True, False), (False, True)]


@pytest.mark.parametrize(("installed", "lacks"), [(["msgspec"], "typer"), (["msgspec", "typer"], "polars")])
def test_a_command_without_its_packages_names_the_extra_that_brings_them(
    installed: list[str], lacks: str, tmp_path: Path
) -> None:
    ended = python_with_only(tmp_path, *installed, code=COMMAND)
    sentence = f"unskew needs {lacks}, which is not installed: pip install 'unskew[platform]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", sentence)


def test_a_clone_in_which_git_made_no_links_is_told_so(tmp_path: Path) -> None:
    """As with core.symlinks=false: each link is a text file with its target."""
    copy = tmp_path / "unskew"
    shutil.copytree(ROOT / "src" / "unskew", copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    links = [path for path in copy.iterdir() if path.is_symlink()]
    for link in links:
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    command = [sys.executable, "-P", "-m", "unskew", "--version"]
    ended = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60)
    assert copy / "collector" in links
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"{copy / 'collector'} is a text file, where git should have made a link: clone again")
    assert ended.stderr.count("\n") == 1
