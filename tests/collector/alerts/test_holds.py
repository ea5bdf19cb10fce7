"""When a condition holds and ends, in runs that go on, are over or have lost their controller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.store.alerting import SLOW, Hook, Log, deliveries, now_us, step

from unskew.collector import events as ev
from unskew.collector.alerts import evaluation as alerting_module
from unskew.collector.alerts.evaluation import Alerting, Condition, decide
from unskew.collector.alerts.process import serve
from unskew.collector.alerts.rules import Rule
from unskew.collector.outcome_words import WARM_UP
from unskew.collector.paths import Store, StoreError
from unskew.collector.write import control_stream
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.spool import SpoolWriter


@pytest.mark.slow
def test_each_named_condition_holds_when_it_should_and_ends(log: Log, hook: Hook) -> None:
    writer = SpoolWriter(log.store, "r", "agent-0.1")
    writer.append(ev.Heartbeat(rank=0, pid=1, iteration=1, progress=1, activity="compute", age_us=0, stalled_us=0))
    writer.append(ev.Dropped(count=7))
    assert writer.close(10.0)
    proposal = ev.PlanProposed(
        proposal="p1", plan_version=1, digest="d", optional=True, reason="rank 0 is slow", verdict=1, plan={}, predicted_us=1,
        baseline_us=2, gain_percent=1.0, cost_us=1, payback_iterations=1, at_iteration=1,
    )  # fmt: skip
    log.add(ev.ModeChanged(mode="observe", by="ann"))
    log.add(SLOW, proposal, ev.DeviceLost(device="d1", rank=1, how="exit", detail="signal 9", detected_us=1))
    names = ("verdict", "death", "stale_heartbeat", "open_proposal", "dropped")
    rules = [Rule(name=name, when=name, webhook=hook.address) for name in names]
    soon_us = now_us()
    assert step(log.store, rules[3], at_us=soon_us) == [], "nobody can approve anything in mode observe"
    log.add(ev.ModeChanged(mode="approve", by="ann"))
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


@pytest.mark.slow
def test_a_run_that_nobody_judges_is_told_after_a_while_until_somebody_does(log: Log, hook: Hook) -> None:
    rule, held = Rule(name="blind", when="cannot_be_judged", webhook=hook.address), hold_controller_lock(log.store, "r")
    soon_us = now_us()
    assert step(log.store, rule, at_us=soon_us) == [], "warm-up takes its time"
    (opened,) = step(log.store, rule, at_us=soon_us + 400 * 10**6)
    assert opened.text == f"nobody can be judged: {WARM_UP}"
    log.add(ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15))
    (closed,) = step(log.store, rule, at_us=soon_us + 401 * 10**6)
    assert closed.closes
    log.add(ev.DetectionLimit(at_iteration=30, smallest_slowdown=None, why="logs came too late"))
    (again,) = step(log.store, rule, at_us=soon_us + 900 * 10**6)
    assert again.text == "nobody can be judged: logs came too late"
    held.release()
    log.add(ev.DetectionLimit(at_iteration=40, smallest_slowdown=1.15))
    assert step(log.store, rule, at_us=soon_us + 901 * 10**6) == [], "calm again, but nobody holds the run any more"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "outcome", "text"),
    [
        ("failed", "wrong", "the run failed: the disk is full; the log holds 9 of the 12 iterations that were committed"),
        ("incomplete", "cannot_be_judged", "nobody can be judged: the log holds 9 of the 12 iterations that were committed"),
    ],
)
def test_how_a_run_ended_is_told_by_its_outcome(
    log: Log, hook: Hook, status: Literal["failed", "incomplete"], outcome: str, text: str
) -> None:
    rules = outcome_rules(hook)
    soon_us = now_us()
    log.add(ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15))
    assert step(log.store, *rules, at_us=soon_us) == []
    log.add(ev.RunFinished(status=status, iterations=9, committed=12, reason="the disk is full"))
    (opened,) = step(log.store, *rules, at_us=soon_us)
    assert (opened.key, opened.text) == (("r", outcome, ""), text)
    assert [bool(one.closes) for one in step(log.store, *rules, at_us=soon_us + 2 * 3600 * 10**6)] == [True]


@pytest.mark.slow
def test_a_run_is_wrong_while_a_verdict_stands(log: Log, hook: Hook) -> None:
    held = hold_controller_lock(log.store, "r")
    log.add(ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15), SLOW)
    (opened,) = step(log.store, *outcome_rules(hook))
    assert (opened.key, opened.text) == (("r", "wrong", ""), "rank 0 is slow")
    log.add(ev.VerdictClosed(verdict=1, until_iteration=5, at_iteration=6, reason="well again"))
    assert [bool(one.closes) for one in step(log.store, *outcome_rules(hook))] == [True]
    held.release()


def outcome_rules(hook: Hook) -> list[Rule]:
    return [
        Rule(name="wrong", when="wrong", webhook=hook.address),
        Rule(name="cannot_be_judged", when="cannot_be_judged", webhook=hook.address),
    ]


@pytest.mark.slow
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
            "stopped after 3 s",
        ),
        ("select run, interval 1 day as subject from runs", ""),
        ("select run, null as subject, null as text from runs", ""),
        ("select run, run from runs", ""),
    ],
)
def test_a_rule_of_any_kind_ends_nothing_and_leaves_no_run(
    log: Log, hook: Hook, monkeypatch: pytest.MonkeyPatch, sql: str, error: str
) -> None:
    if "stopped" in error:
        monkeypatch.setattr(alerting_module, "QUERY_S", 3.0)
    log.add(SLOW)
    rules = [Rule(name="odd", sql=sql, webhook=hook.address), Rule(name="v", when="verdict", webhook=hook.address)]
    asking = alerting_module.RuleReader(log.store)
    assert error in asking.ask(rules[0], now_us()).error
    asking.close()
    opened = step(log.store, *rules)
    assert {change.key[1] for change in opened} == {"v"} | ({"odd"} if not error else set())
    assert not any("None" in text for change in opened for text in (*change.key, change.text))
    assert log.store.spooled_runs() == ["r"]


@pytest.mark.slow
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
