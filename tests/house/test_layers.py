"""Imports go one way: collector <- analytics <- runtime; collector, analytics <- dashboard; only runtime imports torch.

analytics reads and writes no files: src/unskew/edge does that for it.
"""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT
from support.sources import read

MAY_IMPORT = {
    "data": {"data"},
    "collector": {"collector"},
    "analytics": {"collector", "analytics", "data"},
    "edge": {"collector", "analytics", "edge"},
    "runtime": {"collector", "analytics", "runtime"},
    "dashboard": {"collector", "analytics", "edge", "dashboard"},
    "benchmarks": {"collector", "analytics", "edge", "runtime", "benchmarks"},
    "unskew": {"data", "collector", "analytics", "edge", "runtime", "dashboard", "benchmarks", "unskew"},
}
FOLDERS = {"unskew": "src", "edge": "src/unskew/edge"}
MAY_IMPORT_TORCH = {"runtime", "benchmarks"}
NO_IO = (
    "analytics",
    "collector/events",
    "collector/command.py",
    "collector/decoding.py",
    "collector/log_gap.py",
    "collector/outcome_words.py",
    "collector/files/upcasters.py",
)
"""What only computes: files are read and written for it, by src/unskew/edge and by the rest of collector."""
OUTSIDE = re.compile(
    r"(asyncio|duckdb|io|joblib|os|pathlib|shutil|socket|sqlite3|subprocess|tempfile|urllib"
    r"|unskew\.collector\.(?!events|command\b|decoding|log_gap|outcome_words|files\.tail\.decode_event)\w+)(\..*)?"
)
"""Modules through which files, processes, networks and stores are reached."""
READS_OR_WRITES = re.compile(r"open|(read|write)_(text|bytes|csv|parquet|json|ipc|database|html)|(scan|sink)_\w+")
MAY_READ = {"analytics/core/code_hash.py"}  # the hash of the modules themselves


def package_of(module: str) -> str | None:
    """The package of ours that a module belongs to; None for others' modules."""
    first, _, rest = module.partition(".")
    if first != "unskew":
        return None
    second = rest.partition(".")[0]
    return second if second in MAY_IMPORT else "unskew"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str) -> None:
    files = list((ROOT / FOLDERS.get(package, package)).rglob("*.py"))
    if package == "unskew":
        files = [path for path in files if "edge" not in path.parts]
    assert files
    for path in files:
        for module in read(path).imports:
            owner = package_of(module)
            assert owner is None or owner in MAY_IMPORT[package], f"{path} imports {module}"
            assert module.partition(".")[0] != "torch" or package in MAY_IMPORT_TORCH, f"{path} imports {module}"


def test_what_only_computes_does_no_input_or_output() -> None:
    files = {path for name in NO_IO for path in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])}
    for path in files - {ROOT / name for name in MAY_READ}:
        source = read(path)
        found = [*filter(OUTSIDE.fullmatch, source.imports), *filter(READS_OR_WRITES.fullmatch, source.calls)]
        assert not found, f"{path.relative_to(ROOT)} uses {found}: that belongs in src/unskew/edge"


def test_messages_of_analytics_name_no_options_of_the_command_line() -> None:
    """The command names them: another caller has none."""
    for path in (ROOT / "analytics").rglob("*.py"):
        found = [text for text in read(path).texts if re.search(r"--[a-z]", text)]
        assert not found, f"{path.relative_to(ROOT)} says {found}"
