"""Each opening and closing of an alert is told once, across restarts, to real commands and webhooks, and the log says how."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from unskew.cli import app
from unskew.collector import events as ev
from unskew.collector.alerts import delivery as alert_delivery
from unskew.collector.alerts import evaluation as alerting_module
from unskew.collector.alerts.acceptance import waits
from unskew.collector.alerts.evaluation import UNKNOWN, Alerting, AlertTransition, Condition, decide
from unskew.collector.alerts.process import serve, start_alerts
from unskew.collector.alerts.rules import Rule, RuleError, load_rules
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.write import control_stream
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter


def now_us() -> int:
    return time.time_ns() // 1000


SLOW = ev.Verdict(
    verdict=1, cause="slow_device", culprits=(ev.Party(kind="device", rank=0),), since_iteration=1, at_iteration=2,
    confidence=0.9, sentence="rank 0 is slow", evidence={},
)  # fmt: skip


class Hook:
    """A webhook on the loopback that answers `status` and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.slow_s = 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(hook.slow_s)
                self.send_response(hook.status)
                for header in hook.headers.items():
                    self.send_header(*header)
                self.end_headers()

            def do_GET(self) -> None:
                hook.got.append({"phase": "GET", "subject": self.path})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/alert"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def phases(self) -> list[tuple[str, str]]:
        return [(message["phase"], message["subject"]) for message in self.got]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(alert_delivery, "PAUSES_S", (0.01, 0.01))
    hook = Hook()
    yield hook
    hook.close()


class Log:
    """The control stream of a run with two ranks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stream = ControlStream(store, "r", "control", "controller.1")
        started = ev.RunStarted(run="r", device="d", clock="monotonic", mode="auto", ranks=2, options={}, code="", version="")
        self.add(started, *(ev.DeviceJoined(device=f"d{rank}", rank=rank, node="n", pid=1) for rank in range(2)))

    def add(self, *events: ev.Control) -> None:
        self.stream.append(self.stream.version, events, actor="c")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(Store(tmp_path))
    yield log
    log.stream.close()


def step(store: Store, *rules: Rule, at_us: int | None = None) -> list[AlertTransition]:
    """One evaluation by a process of its own making, to the end of its deliveries."""
    alerting = Alerting(store, rules)
    try:
        return alerting.step(at_us or now_us())
    finally:
        alerting.close()


def deliveries(store: Store) -> list[tuple[object, ...]]:
    with open_store(store) as reader:
        return reader.sql("select phase, ok, tries from alert_deliveries order by seq").rows()


def test_an_opening_and_a_closing_are_told_once_also_across_restarts(log: Log, hook: Hook) -> None:
    rule = Rule(name="verdicts", when="verdict", webhook=hook.address)
    assert step(log.store, rule) == []
    log.add(SLOW)
    for _ in range(2):
        step(log.store, rule)
    alerting = Alerting(log.store, [rule])
    for _ in range(2):
        alerting.step(now_us())
    log.add(ev.VerdictClosed(verdict=1, until_iteration=5, at_iteration=6, reason="well again"))
    for _ in range(2):
        alerting.step(now_us())
    alerting.close()
    step(log.store, rule)
    assert hook.phases() == [("opened", "verdict 1"), ("closed", "verdict 1")]
    assert hook.got[0]["alert"] == hook.got[1]["alert"]
    assert (hook.got[0]["run"], hook.got[0]["text"]) == ("r", "rank 0 is slow")
    assert deliveries(log.store) == [("opened", True, 1), ("closed", True, 1)]


def test_each_named_condition_holds_when_it_should_and_ends(log: Log, hook: Hook) -> None:
    writer = SpoolWriter(log.store, "r", "agent-0.1")
    writer.append(ev.Heartbeat(rank=0, pid=1, iteration=1, progress=1, activity="compute", age_us=0, stalled_us=0))
    writer.append(ev.Dropped(count=7))
    assert writer.close(10.0)
    proposal = ev.PlanProposed(
        proposal="p1", plan_version=1, digest="d", optional=True, reason="rank 0 is slow", verdict=1, plan={}, predicted_us=1,
        baseline_us=2, gain_percent=1.0, cost_us=1, payback_iterations=1, at_iteration=1,
    )  # fmt: skip
    log.add(SLOW, proposal, ev.DeviceLost(device="d1", rank=1, how="exit", detail="signal 9", detected_us=1))
    names = ("verdict", "death", "stale_heartbeat", "open_proposal", "dropped")
    rules = [Rule(name=name, when=name, webhook=hook.address) for name in names]
    soon_us = now_us()
    opened = step(log.store, *rules, at_us=soon_us)
    assert {change.key[1:] for change in opened} == {
        ("verdict", "verdict 1"), ("death", "rank 1"), ("open_proposal", "p1"), ("dropped", "agent-0.1"),
    }  # fmt: skip
    (stale,) = step(log.store, *rules, at_us=soon_us + 11_000_000)
    assert stale.key == ("r", "stale_heartbeat", "rank 0")
    assert stale.text == "no heartbeat of rank 0 for 11 s"
    log.add(ev.RunFinished(status="failed", iterations=1))
    closed = step(log.store, *rules, at_us=soon_us + 12_000_000)
    assert {change.key[1] for change in closed} == {"stale_heartbeat", "open_proposal"}
    later = step(log.store, *rules, at_us=soon_us + 2 * 3600 * 10**6)
    assert {change.key[1] for change in later} == {"verdict", "death", "dropped"}
    assert all(change.closes for change in (*closed, *later))


def test_a_run_that_nobody_judges_is_told_after_a_while_until_somebody_does(log: Log, hook: Hook) -> None:
    rule = Rule(name="blind", when="cannot_be_judged", webhook=hook.address)
    soon_us = now_us()
    assert step(log.store, rule, at_us=soon_us) == [], "warm-up takes its time"
    (opened,) = step(log.store, rule, at_us=soon_us + 400 * 10**6)
    assert opened.text == "nobody can be judged yet"
    log.add(ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15))
    (closed,) = step(log.store, rule, at_us=soon_us + 401 * 10**6)
    assert closed.closes
    log.add(ev.DetectionLimit(at_iteration=30, smallest_slowdown=None, why="logs came too late"))
    (again,) = step(log.store, rule, at_us=soon_us + 900 * 10**6)
    assert again.text == "nobody can be judged: logs came too late"


def test_sql_rules_commands_and_failures_that_are_tried_three_times(log: Log, hook: Hook, tmp_path: Path) -> None:
    received = tmp_path / "said"
    delivers = Rule(
        name="ranks", sql="select run, rank as subject, 'hello' as text from devices", command=("tee", "-a", str(received))
    )
    fail = Rule(name="fails", sql="select run from runs", command=("sh", "-c", "echo no pager >&2; exit 3"))
    wrong = Rule(name="wrong", sql="select nothing from runs", webhook=hook.address)
    refused = Rule(name="refused", sql="select run from runs", webhook=hook.address)
    hook.status = 503
    step(log.store, delivers, fail, wrong, refused)
    assert received.read_text().count('"phase":"opened"') == 2
    with open_store(log.store) as reader:
        failed = dict(reader.sql("select target, detail from alert_deliveries where not ok and tries = 3").rows())
    assert failed == {
        "sh -c echo no pager >&2; exit 3": "it ended with 3: no pager",
        hook.address.replace("alert", "…"): "it answered 503 Service Unavailable",
    }
    assert len(hook.got) == 3
    step(log.store, delivers, fail, wrong, refused)
    assert len(hook.got) == 3


MESSAGE = alert_delivery.AlertMessage(alert="a", phase="opened", run="r", rule="x", subject="", text="t", at_us=1)


def test_what_may_have_arrived_is_not_told_again(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_delivery, "TIMEOUT_S", 0.3)
    hook.slow_s = 0.6
    slow = alert_delivery.deliver(Rule(name="x", webhook=hook.address), MESSAGE)
    assert (slow.ok, slow.tries, len(hook.got)) == (False, 1, 1)
    received = tmp_path / "told"
    hangs = alert_delivery.deliver(Rule(name="x", command=("sh", "-c", f"echo x >> {received}; sleep 60 & wait")), MESSAGE)
    assert (hangs.ok, hangs.tries, received.read_text()) == (False, 1, "x\n")
    assert "may have arrived" in hangs.detail


def test_a_command_that_leaves_something_running_has_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_delivery, "TIMEOUT_S", 1.0)
    received = tmp_path / "told"
    rule = Rule(name="x", command=("sh", "-c", f"echo x >> {received}; sleep 3 & exit 0"))
    assert alert_delivery.deliver(rule, MESSAGE) == alert_delivery.DeliveryResult(True, 1)
    talks = Rule(name="x", command=("sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1"))
    assert len(alert_delivery.deliver(talks, MESSAGE).detail) < 400


def test_a_redirect_is_no_delivery(hook: Hook) -> None:
    hook.status, hook.headers = 302, {"Location": "/login"}
    outcome = alert_delivery.deliver(Rule(name="x", webhook=hook.address), MESSAGE)
    assert (outcome.ok, outcome.detail) == (False, "it answered 302 Found")
    assert {message["phase"] for message in hook.got} == {"opened"}


def test_an_answer_that_is_no_http_ends_nothing() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"220 mail.example ESMTP\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        outcome = alert_delivery.deliver(Rule(name="x", webhook=address), MESSAGE)
        thread.join()
    assert (outcome.ok, outcome.tries) == (False, 1)


def test_who_is_slow_holds_up_nobody_else(log: Log, hook: Hook, tmp_path: Path, wait_for: Callable[..., None]) -> None:
    go, received = tmp_path / "go", tmp_path / "told"
    waits = ("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done; cat >> {received}")
    slow = Rule(name="slow", sql="select run, rank as subject from devices", command=waits)
    alerting = Alerting(log.store, [slow, Rule(name="quick", sql="select run from runs", webhook=hook.address)])
    alerting.step(now_us())
    wait_for(lambda: bool(hook.got))
    assert not received.exists()
    go.touch()
    alerting.close()
    assert received.read_text().count('"phase":"opened"') == 2


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("create table x as select 1 as run", "it has to be one SELECT"),
        ("drop view verdicts", "it has to be one SELECT"),
        ("select run from runs; select run from runs", "it has to be one SELECT"),
        (" ", "it has to be one SELECT"),
        ("select '../x' as run", "names run '../x', which the store does not have"),
        ("select 'typo' as run", "names run 'typo', which the store does not have"),
        (
            "select run, sum(a.range * b.range) from runs, range(10000000) a, range(10000000) b group by run",
            "stopped after 1 s",
        ),
        ("select run, interval 1 day as subject from runs", ""),
        ("select run, null as subject, null as text from runs", ""),
        ("select run, run from runs", ""),
    ],
)
def test_a_rule_of_any_kind_ends_nothing_and_leaves_no_run(
    log: Log, hook: Hook, monkeypatch: pytest.MonkeyPatch, sql: str, error: str
) -> None:
    monkeypatch.setattr(alerting_module, "QUERY_S", 1.0)
    log.add(SLOW)
    rules = [Rule(name="odd", sql=sql, webhook=hook.address), Rule(name="v", when="verdict", webhook=hook.address)]
    asking = alerting_module.RuleReader(log.store)
    assert error in asking.ask(rules[0], now_us()).error
    asking.close()
    opened = step(log.store, *rules)
    assert {change.key[1] for change in opened} == {"v"} | ({"odd"} if not error else set())
    assert not any("None" in text for change in opened for text in (*change.key, change.text))
    assert log.store.spooled_runs() == ["r"]


def test_a_run_whose_controller_was_killed_is_over_after_an_hour(log: Log, hook: Hook) -> None:
    writer = SpoolWriter(log.store, "r", "agent-0.1")
    writer.append(ev.Heartbeat(rank=0, pid=1, iteration=1, progress=1, activity="compute", age_us=0, stalled_us=0))
    assert writer.close(10.0)
    rule = Rule(name="s", when="stale_heartbeat", webhook=hook.address)
    soon_us = now_us()
    assert [bool(change.closes) for change in step(log.store, rule, at_us=soon_us + 60 * 10**6)] == [False]
    assert [bool(change.closes) for change in step(log.store, rule, at_us=soon_us + 2 * 3600 * 10**6)] == [True]
    assert step(log.store, rule, at_us=soon_us + 2 * 3600 * 10**6) == []


def test_what_alerts_write_does_not_make_a_dead_run_alive(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what closes an alert would open it again."""
    with monkeypatch.context() as earlier:
        earlier.setattr(control_stream, "time_ns", lambda: time.time_ns() - 2 * 3600 * 10**9)
        log = Log(Store(tmp_path))
        log.add(SLOW)
    rules = [
        Rule(name="v", when="verdict", webhook=hook.address),
        Rule(name="s", sql="select run from runs", webhook=hook.address),
    ]
    assert [[change.key[1] for change in step(log.store, *rules)] for _ in range(2)] == [["s"], []]
    log.stream.close()


def test_a_hundred_at_once_are_two_batches_in_the_log(log: Log, hook: Hook) -> None:
    rule = Rule(name="many", sql="select run, range as subject from runs, range(100)", webhook=hook.address)
    step(log.store, rule)
    assert len({message["alert"] for message in hook.got}) == len(hook.got) == len(deliveries(log.store)) == 100
    assert len(list(log.store.spool("r").glob("alerts@*/*.jsonl"))) == 2


def test_a_full_disk_ends_no_evaluation(log: Log, hook: Hook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was not logged is not told; once the disk takes it, it is."""
    log.add(SLOW)
    rules = tmp_path / "rules.toml"
    rules.write_text(f'webhook = "{hook.address}"\n[[rule]]\nwhen = "verdict"\n')
    full = [True, True]
    whole = Alerting._append

    def append(alerting: Alerting, run: str, *events: ev.Control) -> None:
        if events and full:
            full.pop()
            raise StoreError("the disk is full")
        whole(alerting, run, *events)

    monkeypatch.setattr(Alerting, "_append", append)
    steps = iter([False, False, False, False, True])  # asked twice after a step that failed
    serve(log.store, rules, over=lambda: next(steps), period_s=0.01)
    assert hook.phases() == [("opened", "verdict 1")]
    assert deliveries(log.store) == [("opened", True, 1)]


def test_what_a_killed_process_was_telling_is_not_told_again_and_the_log_says_so(
    log: Log, hook: Hook, wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    rules = log.store.root / "alerts.toml"
    started, over = log.store.root / "started", log.store.root / "over"
    slow_command = f"echo x >> {started}; while [ ! -e {over} ]; do sleep 0.05; done"
    rules.write_text(f'[[rule]]\nwhen = "verdict"\ncommand = ["sh", "-c", "{slow_command}"]\n')
    log.add(SLOW)
    command = [sys.executable, "-m", "unskew", "alerts", "run", "--rules", str(rules), "--store", str(log.store.root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(started.exists)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        over.touch()
    rule = Rule(name="verdict", when="verdict", webhook=hook.address)
    step(log.store, rule)
    assert hook.got == []
    with open_store(log.store) as reader:
        assert reader.sql("select ok, tries, detail from alert_deliveries").rows() == [(False, 0, UNKNOWN)]
        assert reader.sql("select closed_us from alerts")["closed_us"].to_list() == [None]
    assert started.read_text() == "x\n"


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait(done: Callable[[], bool], timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait


keys = st.tuples(st.sampled_from(["r", "s"]), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]))


@given(open_=st.dictionaries(keys, st.just("id")), now=st.sets(keys), failed=st.sets(st.sampled_from(["a", "b"])))
def test_after_the_changes_open_is_what_holds_unless_it_could_not_be_asked(
    open_: dict[tuple[str, str, str], str], now: set[tuple[str, str, str]], failed: set[str]
) -> None:
    conditions = [
        Condition(
            rule,
            {} if rule in failed else {(key[0], key[2]): "t" for key in now if key[1] == rule},
            "x" if rule in failed else "",
        )
        for rule in ("a", "b")
    ]
    after = set(open_)
    for change in decide(open_, conditions):
        assert (change.key in after) == bool(change.closes)
        after ^= {change.key}
    assert after == {key for key in now if key[1] not in failed} | {key for key in open_ if key[1] in failed}


def test_one_evaluator_per_store_and_rules_that_are_gone_close_what_they_opened(log: Log, hook: Hook) -> None:
    log.add(SLOW)
    alerting = Alerting(log.store, [Rule(name="v", when="verdict", webhook=hook.address)])
    alerting.step(now_us())
    with pytest.raises(StoreError, match="another process"):
        Alerting(log.store, [])
    alerting.use([])
    assert [change.text for change in alerting.step(now_us())] == ["the rule is gone"]
    alerting.close()
    assert hook.phases() == [("opened", "verdict 1")]
    log.add(ev.VerdictClosed(verdict=1, until_iteration=5, at_iteration=6, reason="well again"))
    step(log.store, Rule(name="v", when="verdict", webhook=hook.address))
    assert deliveries(log.store) == [("opened", True, 1)]  # nobody was to be told of the closing, so nothing was cut


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[[rule]]\nwhen = 'dead'\nwebhook = 'http://h/'",
            "`$.rule[0].when`, allowed: verdict, death, stale_heartbeat, open_proposal, dropped",
        ),
        ("[[rule]]\nwhen = 'death'", "needs one of command = "),
        ("[[rule]]\nwebhook = 'http://h/'", "needs one of sql = ... and when = ..."),
        ("[[rule]]\nsql = 'select 1'\nwebhook = 'http://h/'", "needs a name"),
        ("[[rule]]\nwhen = 'death'\nwebhook = 'file:///etc/passwd'", "is not an address"),
        ("webhook = 'http://h/'\n[[rule]]\nwhen = 'death'\n[[rule]]\nwhen = 'death'", "two rules are named 'death'"),
        ("[[rule]]\nwhen = 'death'\nwebhook = 'http://me:secret@h/'", "is not an address"),
        ("[[rule]]\nwhen = 'death'\nwebhook = 'http://h:port/'", "is not an address"),
        ("[[rule]]\nwhen = 'death'\nwebhook = 'http://h/a b'", "is not an address"),
        ("[[rule]]\nwhen = 'death'\nolder_than_s = inf\nwebhook = 'http://h/'", "older_than_s is inf, allowed: 0 to"),
        ("[[rule]]\nwhen = 'death'\nolder_than_s = nan\nwebhook = 'http://h/'", "older_than_s is nan, allowed: 0 to"),
        ("[[rule]]\nwhenn = 'death'", "`whenn` - at `$.rule[0]`, known are: name, when, sql"),
        ("[[rule]", "alerts.toml"),
    ],
)
def test_a_wrong_rules_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "alerts.toml"
    file.write_text(text)
    with pytest.raises(RuleError, match=r"alerts\.toml") as refused:
        load_rules(file)
    assert sentence in str(refused.value)
    result = call("run", "--store", str(tmp_path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["alerts", *arguments])


def test_check_and_show_and_run_once(log: Log, hook: Hook, tmp_path: Path) -> None:
    where = ("--store", str(log.store.root))
    rules = tmp_path / "rules.toml"
    rules.write_text(f'webhook = "{hook.address}"\n[[rule]]\nwhen = "verdict"\n')
    log.add(SLOW)
    checked = call("check", "--rules", str(rules), "--json", str(tmp_path / "check.json"), *where)
    assert checked.exit_code == 0
    assert "rank 0 is slow" in checked.stdout
    assert json.loads((tmp_path / "check.json").read_text())[0]["holds"][0]["run"] == "r"
    assert (hook.got, "no alert was opened" in call("show", *where).stdout) == ([], True)
    assert "opened: r verdict verdict 1: rank 0 is slow" in call("run", "--once", "--rules", str(rules), *where).stdout
    assert hook.phases() == [("opened", "verdict 1")]
    assert "rank 0 is slow [open]" in call("show", *where).stdout
    rules.write_text(f'webhook = "{hook.address}"\n[[rule]]\nname = "x"\nsql = "select nope from runs"\n')
    assert call("check", "--rules", str(rules), *where).exit_code == 2


def test_rules_that_came_with_a_store_run_nothing_until_somebody_here_accepts_them(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rules, done, where = log.store.root / "alerts.toml", tmp_path / "done", ("--store", str(log.store.root))
    rules.write_text(f'[[rule]]\nwhen = "verdict"\ncommand = ["touch", "{done}"]\n')
    log.add(SLOW)
    assert start_alerts(log.store) is None
    refused = call("run", "--once", *where)
    assert (refused.exit_code, "is not accepted here" in refused.stderr) == (2, True)
    warned = [call(command, *where).stderr for command in ("check", "show")]
    assert [text.count("is not accepted here, so nobody is told") for text in warned] == [1, 1]
    assert not done.exists()
    accepted = call("accept", *where)
    assert f"verdict -> touch {done}\n" in accepted.stdout
    assert (call("show", *where).stderr, waits(log.store)) == ("", "")
    assert call("run", "--once", *where).exit_code == 0
    assert done.exists()
    rules.write_text(rules.read_text().replace("touch", "rm"))
    assert call("run", "--once", *where).exit_code == 2
    assert done.exists()
