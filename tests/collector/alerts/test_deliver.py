"""Each opening and closing of an alert is told once, across restarts, to real commands and webhooks, and the log says how."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.store.alerting import SLOW, Hook, Log, deliveries, now_us, step

from unskew.collector import events as ev
from unskew.collector.alerts import delivery as alert_delivery
from unskew.collector.alerts.evaluation import UNKNOWN, Alerting
from unskew.collector.alerts.rules import Rule
from unskew.collector.read.reader import open_store


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_hundred_at_once_are_two_batches_in_the_log(log: Log, hook: Hook) -> None:
    rule = Rule(name="many", sql="select run, range as subject from runs, range(100)", webhook=hook.address)
    step(log.store, rule)
    assert len({message["alert"] for message in hook.got}) == len(hook.got) == len(deliveries(log.store)) == 100
    assert len(list(log.store.spool("r").glob("alerts@*/*.jsonl"))) == 2


@pytest.mark.slow
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
