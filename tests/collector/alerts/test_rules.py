"""The rules: their file, the commands that show and try them, and who has to accept them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.store.alerting import SLOW, Hook, Log
from typer.testing import CliRunner, Result

from unskew.cli import app
from unskew.collector.alerts.acceptance import waits
from unskew.collector.alerts.process import start_alerts
from unskew.collector.alerts.rules import MOST_BYTES, RuleError, load_rules
from unskew.collector.paths import Store


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[[rule]]\nwhen = 'dead'\nwebhook = 'http://h/'",
            "rule 1, when: 'dead' is not known, allowed: verdict, death, stale_heartbeat, open_proposal, dropped",
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
        ("[[rule]]\nwhenn = 'death'", "rule 1: whenn is not known, known are: name, when, sql"),
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


@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_rules_that_are_no_file_are_not_waited_for(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "alerts.toml"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes(b"#" * (MOST_BYTES + 1))
    where = ("--store", str(tmp_path))
    for command in ("check", "accept", "run"):
        refused = call(command, *where)
        assert (refused.exit_code, refused.stderr.count("\n"), "cannot be read" in refused.stderr) == (2, 1, True)
    assert "cannot be read" in call("show", *where).stderr
    assert start_alerts(Store(tmp_path)) is None


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
