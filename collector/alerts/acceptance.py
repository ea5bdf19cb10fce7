"""Which rules somebody here has accepted: a store that came from elsewhere brings commands that its new owner has never read.

What is accepted is the content of a rules file, by its sha256, in a file of the user's own; a change is a new content.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from unskew.collector import rights
from unskew.collector.alerts.rules import Rule, RuleError, load_rules, rules_file, text_of
from unskew.collector.paths import Store


def accepted_file() -> Path:
    """The user's list: $XDG_STATE_HOME/unskew/accepted-alerts, by default in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - Path's raises without a home
    return Path(state) / "unskew" / "accepted-alerts"


def accept(rules: Path, text: bytes) -> None:
    """From now on the rules of this text may run. Raises `OSError`."""
    file = accepted_file()
    rights.make_folder(file.parent, rights.PRIVATE)
    with os.fdopen(rights.open_file(file, os.O_WRONLY | os.O_APPEND), "w") as listed:
        listed.write(f"{_digest(text)} {str(rules)!a}\n")


def waits(store: Store) -> str:
    """That the store's rules are not in force, in one sentence; "" when they are, or there are none."""
    rules = rules_file(store)
    try:
        if not rules.exists() or _is_accepted(text_of(rules)):
            return ""
    except RuleError as error:
        return str(error)
    return (
        f"{rules} is not accepted here, so nobody is told of anything: unskew alerts accept --store {store.root} shows what "
        "it runs and accepts it"
    )


def load_accepted(rules: Path) -> tuple[Rule, ...]:
    """The rules of a store's own file. Raises `RuleError` unless they are accepted."""
    known = load_rules(rules, text := text_of(rules))
    if not _is_accepted(text):
        raise RuleError(waits(Store(rules.parent)))
    return known


def _is_accepted(text: bytes) -> bool:
    try:
        lines = accepted_file().read_text(errors="replace").splitlines()
        return _digest(text) in {line.partition(" ")[0] for line in lines}
    except OSError:
        return False


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
