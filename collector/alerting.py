"""Alerts: each opening and each closing of a rule's condition is logged first, then told once.

What is open is read from the log, so a restart knows what was told. An opening or closing that the log holds without word of
its delivery was cut by the end of a process: whether it reached anybody cannot be known, so it is logged as not delivered
rather than told twice.
"""

from __future__ import annotations

import sys
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import duckdb
import msgspec

from unskew.collector.alert_delivery import Message, Outcome, deliver
from unskew.collector.alert_rules import Rule
from unskew.collector.control_stream import ControlStream
from unskew.collector.events import AlertClosed, AlertDelivered, AlertOpened, Control
from unskew.collector.locks import Held, hold
from unskew.collector.paths import Store, StoreError
from unskew.collector.reader import Reader, open_store

STREAM = "alerts"
ENDED = "the condition ended"
UNKNOWN = "the process that told it ended before it knew how that went; it is not told twice"

Key = tuple[str, str, str]
"""(run, rule, subject): an alert is open once for each."""


class Condition(msgspec.Struct, frozen=True):
    """What a rule says now: the text of each (run, subject) for which it holds; `error` when it could not be asked."""

    rule: str
    holds: dict[tuple[str, str], str]
    error: str = ""


class Change(msgspec.Struct, frozen=True):
    """An opening (`text`) or a closing (`closes` = the alert's name, `text` = why)."""

    key: Key
    text: str
    closes: str = ""


def decide(open_alerts: Mapping[Key, str], conditions: Sequence[Condition]) -> list[Change]:
    """What opens and what closes. A condition that could not be asked changes nothing; alerts of rules that are gone close."""
    asked = {condition.rule: condition for condition in conditions}
    now = {(run, condition.rule, subject): text for condition in conditions for (run, subject), text in condition.holds.items()}
    changes = [Change(key, text) for key, text in now.items() if key not in open_alerts]
    for key, alert in open_alerts.items():
        condition = asked.get(key[1])
        if condition is None:
            changes.append(Change(key, "the rule is gone", closes=alert))
        elif not condition.error and key not in now:
            changes.append(Change(key, ENDED, closes=alert))
    return changes


def evaluate(reader: Reader, rule: Rule, now_us: int) -> Condition:
    """Ask a rule of the reader's store."""
    values = {"now_us": now_us, "older_than_us": rule.older_than_us}
    used = {name: value for name, value in values.items() if f"${name}" in rule.query}
    try:
        rows = reader.sql(rule.query, used or None)
    except (duckdb.Error, StoreError) as error:
        return Condition(rule.name, {}, " ".join(str(error).partition("\n\nLINE")[0].split()))
    if "run" not in rows.columns:
        return Condition(rule.name, {}, "its query has no column run")
    holds = {
        (str(row["run"]), str(row.get("subject", ""))): str(row.get("text", rule.name))
        for row in rows.iter_rows(named=True)
        if row["run"] is not None
    }
    return Condition(rule.name, holds)


class Alerting:
    """Evaluates the rules of one store and tells; one such process per store. Raises `StoreError` when another is at it."""

    def __init__(self, store: Store, rules: Iterable[Rule]) -> None:
        self._store, self._rules = store, {rule.name: rule for rule in rules}
        held = hold(store.lock("alerts"), wait_s=0.0)
        if held is None:
            raise StoreError(f"alerts of {store.root} are evaluated by another process already")
        self._lock: Held = held
        self._reader = open_store(store)
        self._open: dict[Key, str] = {}
        self._said: dict[str, str] = {}
        # One thread: what opened is told before it is told to have closed.
        self._teller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="alerts")
        self._pending: list[tuple[Message, Rule, Future[Outcome]]] = []
        self._recall()

    def step(self, now_us: int) -> list[Change]:
        """Ask all rules once; log and tell what changed."""
        self._log_delivered(wait=False)
        self._reader.refresh()
        conditions = [evaluate(self._reader, rule, now_us) for rule in self._rules.values()]
        for condition in conditions:
            self._say(condition)
        changes = decide(self._open, conditions)
        for change in changes:
            self._make(change, now_us)
        return changes

    def use(self, rules: Iterable[Rule]) -> None:
        """Go over to other rules; what rules that are gone had opened closes at the next step."""
        self._rules = {rule.name: rule for rule in rules}

    def close(self) -> None:
        """Tell what is on its way, log how it went, and let go."""
        self._teller.shutdown(wait=True)
        self._log_delivered(wait=True)
        self._reader.close()
        self._lock.release()

    def _make(self, change: Change, now_us: int) -> None:
        run, rule, subject = change.key
        alert = change.closes or uuid.uuid4().hex[:12]
        if change.closes:
            self._append(run, AlertClosed(alert=alert, reason=change.text))
            del self._open[change.key]
        else:
            self._append(run, AlertOpened(alert=alert, rule=rule, subject=subject, text=change.text))
            self._open[change.key] = alert
        if (known := self._rules.get(rule)) is None:
            return
        message = Message(
            alert=alert, phase="closed" if change.closes else "opened", run=run, rule=rule, subject=subject, text=change.text,
            at_us=now_us,
        )  # fmt: skip
        self._pending.append((message, known, self._teller.submit(deliver, known, message)))

    def _log_delivered(self, *, wait: bool) -> None:
        due, self._pending = self._pending, []
        for message, rule, told in due:
            if not wait and not told.done():
                self._pending.append((message, rule, told))
                continue
            outcome = told.result()
            self._append(
                message.run,
                AlertDelivered(
                    alert=message.alert, phase=message.phase, target=rule.target, ok=outcome.ok, tries=outcome.tries,
                    detail=outcome.detail,
                ),
            )  # fmt: skip

    def _recall(self) -> None:
        """What is open by the log, and what was cut."""
        told = set(self._reader.sql("select alert, phase from alert_deliveries").rows())
        cut: dict[str, list[Control]] = defaultdict(list)
        alerts = self._reader.sql("select run, alert, rule, subject, closed_us from alerts order by opened_us")
        for run, alert, rule, subject, closed_us in alerts.rows():
            if closed_us is None:
                self._open[run, rule, subject] = alert
            target = self._rules[rule].target if rule in self._rules else ""
            phases: list[Literal["opened", "closed"]] = ["opened"] if closed_us is None else ["opened", "closed"]
            cut[run] += [
                AlertDelivered(alert=alert, phase=phase, target=target, ok=False, tries=0, detail=UNKNOWN)
                for phase in phases
                if target and (alert, phase) not in told
            ]
        for run, events in cut.items():
            self._append(run, *events)

    def _append(self, run: str, *events: Control) -> None:
        # Opened for each batch: a stream held open would keep a run that ended from being sealed.
        if events:
            stream = ControlStream(self._store, run, STREAM, "alerts")
            try:
                stream.append(stream.version, events, actor="alerts")
            finally:
                stream.close()

    def _say(self, condition: Condition) -> None:
        """An error of a rule, once."""
        if condition.error and self._said.get(condition.rule) != condition.error:
            print(f"alerts: rule {condition.rule} cannot be asked: {condition.error}", file=sys.stderr, flush=True)
        self._said[condition.rule] = condition.error
