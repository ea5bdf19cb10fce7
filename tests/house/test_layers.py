"""Imports go one way: collector <- analytics <- runtime; collector, analytics <- dashboard; only runtime imports torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

MAY_IMPORT = {
    "collector": {"collector"},
    "analytics": {"collector", "analytics"},
    "runtime": {"collector", "analytics", "runtime"},
    "dashboard": {"collector", "analytics", "dashboard"},
    "benchmarks": {"collector", "analytics", "runtime", "benchmarks"},
    "unskew": {"collector", "analytics", "runtime", "dashboard", "benchmarks", "unskew"},
}
MAY_IMPORT_TORCH = {"runtime", "benchmarks"}


def imported(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, which the folder layout does not carry"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str | None:
    """The package of ours that a module belongs to; None for others' modules."""
    first, _, rest = module.partition(".")
    if first != "unskew":
        return None
    second = rest.partition(".")[0]
    return second if second in MAY_IMPORT else "unskew"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str) -> None:
    files = list((ROOT / ("src" if package == "unskew" else package)).rglob("*.py"))
    assert files
    for path in files:
        for module in imported(path):
            owner = package_of(module)
            assert owner is None or owner in MAY_IMPORT[package], f"{path} imports {module}"
            assert module.partition(".")[0] != "torch" or package in MAY_IMPORT_TORCH, f"{path} imports {module}"
