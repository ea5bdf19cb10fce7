"""Rooms, the sub-packages: which may import which, no circle of modules, and each of a size that one can look over.

An import within a function counts like one at the top.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.paths import ROOT
from support.sources import read

ROOMS = {
    "collector": ["events", "files", "write", "projections", "read", "alerts", "formats", "service"],
    "analytics": ["shards", "core", "pipeline", "predictor", "health", "detector", "planners", "scheduler", "cluster",
                  "policies", "loop", "actuators", "replay", "diagnosis", "lab"],
    "runtime": ["model", "rank", "replicas", "node", "control", "attach"],
    "dashboard": ["panels"],
}  # fmt: skip
"""Package -> its rooms, from the lowest up: a module imports from its own and from lower ones. What lies in the package itself
is below them all."""
ABOVE = {"dashboard": {"run_list", "run_page", "streamlit_app"}}
"""Modules of a package itself that are above its rooms: they put them together."""
BELOW = {"collector": {"events"}}
"""Rooms of a package that are below its own modules: what these speak of."""
LAB_IS_FOR = ("unskew.analytics.lab.", "unskew.commands.", "unskew.edge.", "unskew.benchmarks.")

MOST_LINES = 400
MOST_MODULES = 14


def modules() -> dict[str, Path]:
    """Name -> file of every module of ours."""
    found = {}
    for folder in (*ROOMS, "benchmarks", "data"):
        found.update({_name(path, "unskew"): path for path in (ROOT / folder).rglob("*.py")})
    for path in (ROOT / "src").rglob("*.py"):  # its links are not followed
        found[_name(path, "")] = path
    return found


def _name(path: Path, package: str) -> str:
    relative = path.relative_to(ROOT if package else ROOT / "src").with_suffix("")
    return ".".join(part for part in (package, *relative.parts) if part and part != "__init__")


FILES = modules()


def imports(name: str) -> set[str]:
    """The modules of ours that a module imports, at whatever depth."""
    found = {one if one in FILES else one.rpartition(".")[0] for one in read(FILES[name]).imports}
    return (found & FILES.keys()) - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name) for name in FILES}


def height(name: str, package: str) -> int:
    """Where a module of the package stands in the order of its rooms."""
    inside = name.split(".")[2:]
    if inside and inside[0] in BELOW.get(package, ()):
        return -1
    if inside and inside[0] in ROOMS[package]:
        return 1 + ROOMS[package].index(inside[0])
    return len(ROOMS[package]) + 1 if inside and inside[0] in ABOVE.get(package, ()) else 0


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_lies_below_them(package: str) -> None:
    prefix = f"unskew.{package}."
    assert set(ROOMS[package]) == {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    up = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if name.startswith(prefix) and other.startswith(prefix) and height(other, package) > height(name, package)
    ]
    assert not up, "; ".join(up)


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(reversed(circle.args[1])))


def test_the_lab_is_for_commands_and_benches() -> None:
    users = {name for name, others in graph().items() if any(other.startswith("unskew.analytics.lab") for other in others)}
    assert {name for name in users if not name.startswith(LAB_IS_FOR)} == set()


def test_what_is_shipped_needs_no_helpers_of_tests() -> None:
    users = {name for name, path in FILES.items() if re.search(r"^\s*(from|import) support\b", path.read_text(), re.MULTILINE)}
    assert users
    assert all(name.startswith("unskew.benchmarks.") for name in users), users


def test_no_module_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_room_is_crowded() -> None:
    inside: dict[Path, int] = {}
    for path in (*FILES.values(), *(ROOT / "tests").rglob("*.py")):
        inside[path.parent] = inside.get(path.parent, 0) + (path.name != "__init__.py")
    crowded = {str(room.relative_to(ROOT)): count for room, count in inside.items() if count > MOST_MODULES}
    assert crowded == {}
