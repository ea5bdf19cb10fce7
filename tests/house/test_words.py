"""The field's words (docs/glossary.md): names, headings and columns use them, and a class name says what one thing is."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import duckdb
from support.paths import ROOT

from unskew.collector.files import rows
from unskew.collector.read.views import VIEWS, create_views

INSTEAD = {
    "epoch": "plan version",
    "way": "stage order, path or method",
    "mate": "pipeline peer",
    "habit": "bias",
    "accuse": "flag",
    "accusation": "verdict",
    "doubt": "suspect",
    "believe": "estimate",
    "belief": "estimate",
    "dear": "expensive",
    "rival": "baseline or candidate",
    "pulse": "liveness or status",
    "desk": "approval queue",
    "lying": "open proposal",
    "ledger": "control log",
    "seat": "rank spec",
    "luck": "randomness",
    "happening": "cluster event",
    "tell": "report",
    "told": "reported",
    "say": "report or state",
    "said": "reported or stated",
    "stands": "is",
    "comes to": "is",
    "error bar": "prediction interval",
}
"""Our own word -> the field's. Inflections count, too."""

STAY = {
    "epoch": "the alias of plan_version in SQL",
    "set_epoch": "the name that torch's samplers have for it",
    "accused": "the alias of the view flagged",
    "scheduler_beliefs": "the name by which people start this bench",
}
"""Names that stay, with the reason."""

TEXTS_ARE_NAMES = ("runtime/protocol.py", "collector/events/")
"""Messages and events: there a class is named for what has happened."""

PARTICIPLE = re.compile(
    r"(?:^|_|[a-z])((?!Speed$|Seed$)[A-Z][a-z]*ed|Known|Seen|Told|Taken|Given|Found|Made|Held|Sent|Kept|Done|Gone)$"
)

SOURCES = sorted(
    file
    for folder in ("collector", "analytics", "runtime", "dashboard", "src/unskew", "benchmarks", "tests", "tools", "examples")
    for file in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in (file, *file.parents))
)
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
_ENDING = r"(?:s|d|es|ed|r|st|ful|\w*ing)?"
_BANNED = {word: re.compile(rf"\b{re.escape(word)}{_ENDING}\b") for word in INSTEAD}


_TOKEN = re.compile(
    r"""#[^\n]*|\d\w*|(?i:[rbuf]{0,2})(?:\"{3}(?:[^\\"]|\\.|"(?!""))*\"{3}|\'{3}(?:[^\\']|\\.|'(?!''))*\'{3}"""
    r"""|"(?:[^\\"\n]|\\.)*"|'(?:[^\\'\n]|\\.)*')|([^\W\d]\w*)""",
    re.DOTALL,
)
"""A comment, a number, a string, or a name: what tokenize finds, in a tenth of its time."""


def complaint(name: str) -> str | None:
    """What is wrong with the words of a name; None when nothing is."""
    if name in STAY:
        return None
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_|\W", " ", name).lower()
    for word, pattern in _BANNED.items():
        if pattern.search(text):
            return f'"{name}" has our own word "{word}": use {INSTEAD[word]} (docs/glossary.md)'
    return None


@cache
def names_in(file: Path) -> tuple[tuple[int, str], ...]:
    """Place in the text and name of every identifier and keyword."""
    return tuple((found.start(), found[1]) for found in _TOKEN.finditer(file.read_text()) if found[1])


def classes_in(file: Path) -> Iterator[tuple[int, str]]:
    """Place in the text and name of every class."""
    return ((at, name) for (_, keyword), (at, name) in pairwise(names_in(file)) if keyword == "class")


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def place_at(file: Path, at: int) -> str:
    return place(file, file.read_text().count("\n", 0, at) + 1)


def test_names_are_found_as_python_finds_them() -> None:
    for file in (Path(__file__), ROOT / "collector" / "read" / "views.py", ROOT / "collector" / "files" / "rows.py"):
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        assert [name for _, name in names_in(file)] == [one.string for one in tokens if one.type == tokenize.NAME], file


def test_identifiers_use_the_words_of_the_glossary() -> None:
    """Names of tests are sentences, and not among them."""
    first: dict[str, tuple[Path, int]] = {}
    for file in SOURCES:
        for at, name in names_in(file):
            first.setdefault(name, (file, at))
    found = [
        f"{place_at(*where)}: {wrong}"
        for name, where in first.items()
        if not name.startswith("test_") and (wrong := complaint(name))
    ]
    assert not found, "\n".join(found)


def test_headings_use_the_words_of_the_glossary() -> None:
    found = [
        f"{place(page, number)}: {wrong}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if line.startswith("#") and (wrong := complaint(line))
    ]
    assert not found, "\n".join(found)


def test_columns_use_the_words_of_the_glossary() -> None:
    with duckdb.connect() as connection:
        rows.create_table(connection, "log")
        create_views(connection)
        columns = [(view, str(row[0])) for view in VIEWS for row in connection.sql(f"describe {view}").fetchall()]
    found = [f"view {view}: {wrong}" for view, column in columns for name in (view, column) if (wrong := complaint(name))]
    assert not found, "\n".join(dict.fromkeys(found))


def test_a_class_name_says_what_one_thing_is() -> None:
    places = defaultdict(list)
    for file in SOURCES:
        if any(file.is_relative_to(ROOT / folder) for folder in ("tests", "examples")):
            continue
        for at, name in classes_in(file):
            places[name].append((file, at))
    found = [
        f"{place_at(*where[0])}: class {name} is also in {place_at(*where[1])}: give each its own name"
        for name, where in places.items()
        if len(where) > 1
    ]
    found += [
        f"{place_at(*where[0])}: class {name} is a participle: name what it is (past tense is for events and messages)"
        for name, where in places.items()
        if PARTICIPLE.search(name) and not str(where[0][0].relative_to(ROOT)).startswith(TEXTS_ARE_NAMES)
    ]
    assert not found, "\n".join(found)


def test_lines_of_the_pages_are_at_most_120_columns_wide() -> None:
    """Tables, links and what people type or see as it is (indented) may be wider."""
    found = [
        f"{place(page, number)}: {len(line)} columns, at most 120 are read with ease"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if len(line) > 120 and not line.startswith(("|", "    ")) and "](" not in line
    ]
    assert not found, "\n".join(found)
