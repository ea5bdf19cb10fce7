"""Rules of alerts: conditions by name or as SQL over the views, and who receives them. Read from a TOML file.

::

    command = ["logger", "-t", "unskew"]      # of rules that name nobody; gets the alert as JSON on stdin
    [[rule]]
    when = "death"                            # or verdict, stale_heartbeat, open_proposal, dropped,
                                              # wrong, cannot_be_judged
    webhook = "http://127.0.0.1:9000/alert"   # gets the alert as JSON by POST
    [[rule]]
    name = "slow start"
    sql = "select run, rank as subject, 'no news' as text from health where last_iteration is null"

A condition is a query whose rows have `run` and, when it may hold several times in a run, `subject`; `text` says what is wrong.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from unskew.collector.decoding import complaint
from unskew.collector.paths import Store, StoreError

FILE = "alerts.toml"
MOST_BYTES = 1024 * 1024
When = Literal["verdict", "death", "stale_heartbeat", "open_proposal", "dropped", "wrong", "cannot_be_judged"]
_HEARD = "(select run from writers where writer != 'alerts@alerts' group by run having max(last_us) > $now_us - 3600000000)"
_GOING_ON = f"run in (select run from runs where finished_us is null or finished_us > $now_us - 3600000000) and run in {_HEARD}"
"""Runs that go on or ended within the hour, so that what ended a run is still reported. A run whose controller was killed
has no end in its log: it is over when nobody wrote for an hour (what alerts write of it does not count)."""
_UNFINISHED = f"run in (select run from runs where finished_us is null) and run in {_HEARD}"

CONDITIONS: Mapping[str, str] = {
    "verdict": f"""
        select run, 'verdict ' || verdict as subject, sentence as text from verdicts
        where until_iteration is null and cause not in ('dead', 'hung') and at_us < $now_us - $older_than_us and {_GOING_ON}""",
    "death": f"""
        select run, 'rank ' || rank as subject, 'rank ' || rank || ' (' || device || ') is lost: ' || detail as text
        from devices where state = 'lost' and {_GOING_ON}""",
    "stale_heartbeat": f"""
        select run, 'rank ' || rank as subject,
            'no heartbeat of rank ' || rank || ' for ' || (($now_us - heartbeat_us) // 1000000) || ' s' as text
        from health
        where state = 'joined' and heartbeat_us < $now_us - $older_than_us
            and {_UNFINISHED}""",
    "open_proposal": f"""
        select run, proposal as subject, 'proposal ' || proposal || ' waits for a decision: ' || reason as text from proposals
        where waits and at_us < $now_us - $older_than_us and {_UNFINISHED}""",
    "wrong": f"""
        select run, why as text from outcomes where outcome = 'wrong' and {_GOING_ON}""",
    "cannot_be_judged": f"""
        select run, case when smallest_slowdown is null then 'nobody can be judged: ' else '' end || why as text
        from outcomes join runs using (run) left join (select run, max(at_us) as since_us from detection_limits group by run)
            using (run)
        where outcome = 'cannot_be_judged' and (({_UNFINISHED} and
            coalesce(since_us, started_us) < $now_us - $older_than_us) or (status = 'incomplete' and {_GOING_ON}))""",
    "dropped": f"""
        select run, writer as subject, writer || ' had to drop ' || sum(n_dropped) || ' events' as text from writers
        where {_GOING_ON} group by run, writer having sum(n_dropped) > 0""",
}
"""By name. `$now_us` is wall clock; `$older_than_us` is the rule's `older_than_s`."""

_OLDER_THAN_S = {"stale_heartbeat": 10.0, "cannot_be_judged": 300.0}
_LONGEST_S = 366 * 86_400.0


class RuleError(StoreError):
    """A rule that cannot be used; one sentence: which, why, what is allowed."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `when` and `sql`; one of `command` and `webhook`, or what the file has for all."""

    name: str = ""
    when: When | None = None
    sql: str = ""
    older_than_s: float | None = None
    command: tuple[str, ...] = ()
    webhook: str = ""

    @property
    def query(self) -> str:
        return self.sql if self.when is None else CONDITIONS[self.when]

    @property
    def older_than_us(self) -> int:
        age_s = _OLDER_THAN_S.get(str(self.when), 0.0) if self.older_than_s is None else self.older_than_s
        return int(age_s * 1e6)

    @property
    def target(self) -> str:
        """The recipient, as the log names it: of a webhook without its path, which is a secret with many services."""
        address = urlsplit(self.webhook)
        return f"{address.scheme}://{address.netloc}/…" if self.webhook else " ".join(self.command)


class _RulesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: tuple[Rule, ...] = ()
    command: tuple[str, ...] = ()
    webhook: str = ""


def rules_file(store: Store) -> Path:
    """Where a store's rules lie when no other file is named."""
    return store.root / FILE


def text_of(path: Path) -> bytes:
    """What a file of rules holds. Raises `RuleError`, also of what would be waited for (a FIFO) or would fill the memory."""
    why = f"allowed: a file of at most {MOST_BYTES:,} bytes"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            text = file.read(MOST_BYTES + 1) if regular else b""
        if regular and len(text) <= MOST_BYTES:
            return text
    except OSError as error:
        why = str(error.strerror)
    raise RuleError(f"{path} cannot be read ({why}): it holds the rules of alerts")


def load_rules(path: Path, text: bytes | None = None) -> tuple[Rule, ...]:
    """The rules of a file, each with a name and a recipient; `text`: what it holds, where that was read. Raises `RuleError`."""
    try:
        content = msgspec.toml.decode(text_of(path) if text is None else text, type=_RulesFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{path}: {complaint(error)}{_allowed(str(error))}; docs/guide/alerts.md shows a rules file") from error
    rules = tuple(_completed(path, number, rule, content) for number, rule in enumerate(content.rule, 1))
    names = [rule.name for rule in rules]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise RuleError(f"{path}: two rules are named {double!r}; name each by name = ...")
    return rules


def _allowed(complaint: str) -> str:
    """What is allowed where the decoder found something else; the decoder names only the place."""
    if ".when`" in complaint:
        return f", allowed: {', '.join(get_args(When))}"
    if "unknown field" in complaint:
        kind = Rule if ".rule[" in complaint else _RulesFile
        return f", known are: {', '.join(field.name for field in msgspec.structs.fields(kind))}"
    return ""


def _completed(path: Path, number: int, rule: Rule, content: _RulesFile) -> Rule:
    where = f"{path}: rule {rule.name or number}"
    if (rule.when is None) == (not rule.sql):
        raise RuleError(f"{where} needs one of sql = ... and when = ..., which is one of {', '.join(get_args(When))}")
    if rule.sql and not rule.name:
        raise RuleError(f"{where} has sql and needs a name")
    if not rule.command and not rule.webhook:
        rule = msgspec.structs.replace(rule, command=content.command, webhook=content.webhook)
    if bool(rule.command) == bool(rule.webhook):
        raise RuleError(
            f"{where} needs one of command = [...] and webhook = ..., its own or one for all at the top of the file"
        )
    if rule.webhook and not is_address(rule.webhook):
        raise RuleError(f"{where}: its webhook is not an address like http://host:port/path (ASCII, without user:password@)")
    if any("\0" in word for word in rule.command):
        raise RuleError(f"{where}: its command holds a NUL character, which no program can be given")
    if rule.older_than_s is not None and not 0 <= rule.older_than_s <= _LONGEST_S:
        raise RuleError(f"{where}: older_than_s is {rule.older_than_s:g}, allowed: 0 to {_LONGEST_S:g} (a year)")
    return msgspec.structs.replace(rule, name=rule.name or str(rule.when))


def is_address(webhook: str) -> bool:
    """Whether it can be posted to."""
    try:
        parts = urlsplit(webhook)
        known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
    return known and "@" not in parts.netloc and webhook.isascii() and webhook.isprintable() and " " not in webhook
