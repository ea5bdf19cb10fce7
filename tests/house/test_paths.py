"""The lists of docs/architecture.md, of what passes through which files: there are such files, and as many as it says."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

FOLDERS = ("analytics", "collector", "dashboard", "runtime", "src/unskew")
FILES = [
    f"/{file.relative_to(ROOT).with_suffix('')}".removesuffix("/__init__")
    for of in FOLDERS
    for file in (ROOT / of).rglob("*.py")
]
LIST = re.compile(r"\*\*([^*]+)\*\* \((\d+); [^)]*\): (.*?)\.(?: [A-Z].*)?")
TEXT = (ROOT / "docs" / "architecture.md").read_text().replace("\n\n", "\0").replace("\n", " ")
LISTS = {found[1]: found.groups()[1:] for paragraph in TEXT.split("\0") if (found := LIST.fullmatch(paragraph))}


@pytest.mark.parametrize(("count", "names"), LISTS.values(), ids=LISTS)
def test_a_list_counts_files_that_there_are(count: str, names: str) -> None:
    """A name without a folder is in that of the one before."""
    named, folder = list[str](), ""
    for entry in re.split(r"[,;] ", names):
        for name in entry.split(" or "):
            folder = name.rpartition("/")[0] or folder
            named.append(f"/{folder}/{name.rpartition('/')[2]}")
            assert name == "the importer" or sum(file.endswith(named[-1]) for file in FILES) == 1, named[-1]
    assert len(set(named)) == len(named)
    assert len(re.split(r"[,;] ", names)) == int(count)


def test_four_are_found() -> None:
    assert len(LISTS) == 4
