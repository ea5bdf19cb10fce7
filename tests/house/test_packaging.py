"""The wheel: what is in it, and that a user's own folders beside train.py never shadow ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import files
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGES = ("collector", "analytics", "runtime", "dashboard", "data")
MOST_DOWNLOADED = 5_000_000
NOT_SHIPPED = {"unskew/data/README.md"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that a stale build folder of the checkout plays no part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "bin", *PACKAGES, "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (source / "data" / "store" / "runs").mkdir(parents=True, exist_ok=True)
    (source / "data" / "store" / "runs" / "private.toml").write_text("a person's own run")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True, timeout=100)
    (path,) = out.glob("unskew-*.whl")
    return path


@pytest.mark.slow
@pytest.mark.limit(120)
def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    tracked = subprocess.run(["git", "ls-files", *PACKAGES, "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = [Path(name) for name in tracked.stdout.split() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    expected = {str(path.relative_to("src") if path.parts[0] == "src" else "unskew" / path) for path in ours} - NOT_SHIPPED
    assert expected <= inside, expected - inside
    assert all(name.startswith(("unskew/", "unskew-")) for name in inside)
    assert any(name.endswith(".data/scripts/unskew") for name in inside)
    assert not any("benchmarks" in name or "private" in name for name in inside)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_what_a_training_image_needs_beside_torch_is_small(wheel: Path) -> None:
    """By what `unskew` itself depends on, unpacked, which is more than the download."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name.partition(">")[0] for name in project["dependencies"]] == ["msgspec"]
    needs = wheel.stat().st_size + sum(file.size or 0 for file in files("msgspec") or ())
    assert needs <= MOST_DOWNLOADED


@pytest.mark.slow
@pytest.mark.limit(120)
def test_it_imports_beside_foreign_folders_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    installed, project = tmp_path / "installed", tmp_path / "project"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in PACKAGES:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("raise ImportError('the foreign folder was imported')")
    names = [f"unskew.{name}" for name in PACKAGES] + ["unskew.runtime.options", "unskew.collector.events", "unskew.cli"]
    (project / "train.py").write_text(f"import {', '.join(names)}; print(*unskew.__path__, *unskew.runtime.__path__)")
    ran = subprocess.run(
        [sys.executable, "train.py"],
        cwd=project,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(installed / "unskew"), str(installed / "unskew" / "runtime")]


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    needed = [name for name in needed if not name.startswith("unskew[")]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name.partition(">")[0].lower() for name in needed} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
