"""Alerts: each opening and each closing of a rule's condition is logged first, then delivered once.

What is open is read from the log, so a restart knows what was delivered. An opening or closing that the log holds without
word of its delivery was cut by the end of a process: whether it reached anybody cannot be known, so it is logged as not
delivered rather than delivered twice.
"""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import duckdb
import msgspec

from unskew.collector.alerts.delivery import AlertMessage, DeliveryResult, deliver
from unskew.collector.alerts.rules import Rule
from unskew.collector.events import AlertClosed, AlertDelivered, AlertOpened, Control
from unskew.collector.locks import HeldLock, hold
from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report
from unskew.collector.read.reader import Reader
from unskew.collector.write.control_stream import ControlStream

STREAM = "alerts"
ENDED = "the condition ended"
GONE = "the rule is gone"
QUERY_S = 10.0
"""A rule that takes longer is stopped: the others have to be asked, too."""
UNKNOWN = "the process that delivered it ended before it knew how that went; it is not delivered twice"

Key = tuple[str, str, str]
"""(run, rule, subject): an alert is open once for each."""


class Condition(msgspec.Struct, frozen=True):
    """The answer of a rule now: the text of each (run, subject) for which it holds; `error` when it could not be asked."""

    rule: str
    holds: dict[tuple[str, str], str]
    error: str = ""


class AlertTransition(msgspec.Struct, frozen=True):
    """An opening (`text`) or a closing (`closes` = the alert's name, `text` = why)."""

    key: Key
    text: str
    closes: str = ""


def decide(open_alerts: Mapping[Key, str], conditions: Sequence[Condition]) -> list[AlertTransition]:
    """What opens and what closes. A condition that could not be asked changes nothing; alerts of rules that are gone close."""
    asked = {condition.rule: condition for condition in conditions}
    now = {(run, condition.rule, subject): text for condition in conditions for (run, subject), text in condition.holds.items()}
    changes = [AlertTransition(key, text) for key, text in now.items() if key not in open_alerts]
    for key, alert in open_alerts.items():
        condition = asked.get(key[1])
        if condition is None:
            changes.append(AlertTransition(key, GONE, closes=alert))
        elif not condition.error and key not in now:
            changes.append(AlertTransition(key, ENDED, closes=alert))
    return changes


class RuleReader(Reader):
    """A reader that asks rules."""

    def ask(self, rule: Rule, now_us: int) -> Condition:
        """The answer of the rule now."""
        values = {"now_us": now_us, "older_than_us": rule.older_than_us}
        used = {name: value for name, value in values.items() if f"${name}" in rule.query}
        alarm = threading.Timer(QUERY_S, self._connection.interrupt)
        alarm.start()
        try:
            kinds = [statement.type for statement in self._connection.extract_statements(rule.query)]
            if kinds != [duckdb.StatementType.SELECT]:
                return Condition(rule.name, {}, "it has to be one SELECT")
            columns, rows = self._answer(rule.query, used or None, lambda found: (found.columns, found.fetchall()))
        except duckdb.InterruptException:
            return Condition(rule.name, {}, f"it was stopped after {QUERY_S:g} s")
        except (duckdb.Error, StoreError) as error:
            return Condition(rule.name, {}, " ".join(str(error).partition("\n\nLINE")[0].split()))
        finally:
            alarm.cancel()
        return self._condition(rule, [dict(zip(columns, row, strict=True)) for row in rows], columns)

    def _condition(self, rule: Rule, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Condition:
        if "run" not in columns:
            return Condition(rule.name, {}, "its query has no column run")
        holds: dict[tuple[str, str], str] = {}
        for row in rows:
            run, subject, text = row["run"], row.get("subject"), row.get("text")
            if run is None:
                continue
            if not self._has(str(run)):
                return Condition(rule.name, {}, f"its query names run {str(run)!r}, which the store does not have")
            holds[str(run), "" if subject is None else str(subject)] = rule.name if text is None else str(text)
        return Condition(rule.name, holds)

    def _has(self, run: str) -> bool:
        try:
            return self._store.spool(run).is_dir() or self._store.sealed(run).is_dir()
        except StoreError:  # no name of a run
            return False


class Alerting:
    """Evaluates the rules of one store and delivers what changes; one such process per store. Raises `StoreError` when
    another is at it."""

    def __init__(self, store: Store, rules: Iterable[Rule]) -> None:
        self._store, self._rules = store, {rule.name: rule for rule in rules}
        held = hold(store.lock("alerts"), wait_s=0.0)
        if held is None:
            raise StoreError(f"alerts of {store.root} are evaluated by another process already")
        self._lock: HeldLock = held
        self._reader = RuleReader(store)
        self._open: dict[Key, str] = {}
        self._reported: dict[str, str] = {}
        # One thread for each recipient: an opening is delivered before its closing, and who is slow holds up
        # nobody else.
        self._deliverers: dict[tuple[str, ...], ThreadPoolExecutor] = {}
        self._pending: list[tuple[AlertMessage, Rule, Future[DeliveryResult]]] = []
        self._recall()

    def step(self, now_us: int) -> list[AlertTransition]:
        """Ask all rules once; log and deliver what changed."""
        self._log_delivered(wait=False)
        self._reader.refresh()
        conditions = [self._reader.ask(rule, now_us) for rule in self._rules.values()]
        for condition in conditions:
            self._report(condition)
        changes = decide(self._open, conditions)
        for run in dict.fromkeys(change.key[0] for change in changes):
            self._make(run, [change for change in changes if change.key[0] == run], now_us)
        return changes

    def use(self, rules: Iterable[Rule]) -> None:
        """Go over to other rules; what rules that are gone had opened closes at the next step."""
        self._rules = {rule.name: rule for rule in rules}

    def close(self) -> None:
        """Wait for what is being delivered, log how it went, and let go."""
        for deliverer in self._deliverers.values():
            deliverer.shutdown(wait=True)
        self._log_delivered(wait=True)
        self._reader.close()
        self._lock.release()

    def _make(self, run: str, changes: Sequence[AlertTransition], now_us: int) -> None:
        """Log changes of a run in one batch, then deliver each."""
        named = [(change, change.closes or uuid.uuid4().hex[:12]) for change in changes]
        self._append(run, *(_event(change, alert) for change, alert in named))
        for change, alert in named:
            if change.closes:
                del self._open[change.key]
            else:
                self._open[change.key] = alert
            if (rule := self._rules.get(change.key[1])) is not None:
                self._deliver(rule, change, alert, now_us)

    def _deliver(self, rule: Rule, change: AlertTransition, alert: str, now_us: int) -> None:
        run, name, subject = change.key
        message = AlertMessage(
            alert=alert, phase="closed" if change.closes else "opened", run=run, rule=name, subject=subject, text=change.text,
            at_us=now_us,
        )  # fmt: skip
        whom = (rule.webhook, *rule.command)
        if whom not in self._deliverers:
            self._deliverers[whom] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="alerts")
        self._pending.append((message, rule, self._deliverers[whom].submit(deliver, rule, message)))

    def _log_delivered(self, *, wait: bool) -> None:
        due = [one for one in self._pending if wait or one[2].done()]
        for run in dict.fromkeys(message.run for message, *_ in due):
            done = [one for one in due if one[0].run == run]
            self._append(run, *(_delivered(message, rule, delivery.result()) for message, rule, delivery in done))
            self._pending = [one for one in self._pending if one not in done]

    def _recall(self) -> None:
        """What is open by the log, and what was cut."""
        delivered = set(self._reader.sql("select alert, phase from alert_deliveries").rows())
        cut: dict[str, list[Control]] = defaultdict(list)
        alerts = self._reader.sql("select run, alert, rule, subject, closed_us, closed_reason from alerts order by opened_us")
        for run, alert, rule, subject, closed_us, reason in alerts.rows():
            if closed_us is None:
                self._open[run, rule, subject] = alert
            target = self._rules[rule].target if rule in self._rules else ""
            phases: list[Literal["opened", "closed"]] = (
                ["opened"] if closed_us is None or reason == GONE else ["opened", "closed"]
            )
            cut[run] += [
                AlertDelivered(alert=alert, phase=phase, target=target, ok=False, tries=0, detail=UNKNOWN)
                for phase in phases
                if target and (alert, phase) not in delivered
            ]
        for run, events in cut.items():
            self._append(run, *events)

    def _append(self, run: str, *events: Control) -> None:
        # Opened for each batch: a stream held open would keep a run that ended from being sealed.
        if events:
            stream = ControlStream(self._store, run, STREAM, "alerts")
            try:
                stream.add(*events)
            finally:
                stream.close()

    def _report(self, condition: Condition) -> None:
        """Print an error of a rule, once."""
        if condition.error and self._reported.get(condition.rule) != condition.error:
            report(f"alerts: rule {condition.rule} cannot be asked: {condition.error}")
        self._reported[condition.rule] = condition.error


def _event(change: AlertTransition, alert: str) -> Control:
    if change.closes:
        return AlertClosed(alert=alert, reason=change.text)
    return AlertOpened(alert=alert, rule=change.key[1], subject=change.key[2], text=change.text)


def _delivered(message: AlertMessage, rule: Rule, outcome: DeliveryResult) -> AlertDelivered:
    return AlertDelivered(
        alert=message.alert, phase=message.phase, target=rule.target, ok=outcome.ok, tries=outcome.tries, detail=outcome.detail
    )
