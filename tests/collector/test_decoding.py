"""What a decoder complains of is said in words, with its place counted as people count."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unskew.collector.alerts.rules import RuleError, load_rules
from unskew.collector.decoding import complaint


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    share: float | None = None


class Outer(msgspec.Struct):
    rule: list[Inner]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"rule": [{"name": "a"}, {"name": 3}]}, "rule 2, name: a whole number is given, a text is needed"),
        ({"rule": [{"name": "a", "share": "b"}]}, "rule 1, share: a text is given, a number or nothing is needed"),
        ({"rule": [{"nam": "a"}]}, "rule 1: nam is not known"),
        ({"rule": [{}]}, "rule 1: name is missing"),
        ({}, "rule is missing"),
    ],
)
def test_msgspecs_messages_have_words(data: object, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(data, Outer)
    assert complaint(caught.value) == words


def test_a_file_of_rules_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "alerts.toml"
    file.write_text("[[rule]]\nname = 5\n")
    with pytest.raises(RuleError, match="rule 1, name: a whole number is given, a text is needed"):
        load_rules(file)
