"""Telling somebody of an alert: a command that gets it as JSON on stdin, or a webhook that gets it by POST."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from typing import Literal

import msgspec

from unskew.collector.alert_rules import Rule

TIMEOUT_S = 10.0
PAUSES_S = (0.5, 2.0)
"""Before the second and the third try."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What is told. `alert` names the opening; its closing has the same."""

    alert: str
    phase: Literal["opened", "closed"]
    run: str
    rule: str
    subject: str
    text: str
    at_us: int


class Outcome(msgspec.Struct, frozen=True):
    ok: bool
    tries: int
    detail: str = ""


def deliver(rule: Rule, message: Message) -> Outcome:
    """Tell it; what fails for certain is tried again, up to three times in all. Blocks meanwhile."""
    detail = ""
    for number, pause_s in enumerate((0.0, *PAUSES_S), start=1):
        time.sleep(pause_s)
        detail = _try(rule, msgspec.json.encode(message))
        if not detail:
            return Outcome(True, number)
    return Outcome(False, 1 + len(PAUSES_S), detail)


def _try(rule: Rule, body: bytes) -> str:
    """What went wrong; empty when nothing did."""
    try:
        return _post(rule.webhook, body) if rule.webhook else _run(rule.command, body)
    except subprocess.TimeoutExpired:
        return f"it took longer than {TIMEOUT_S:g} s"
    except OSError as error:  # URLError is one
        return str(getattr(error, "reason", None) or error.strerror or error)


def _post(address: str, body: bytes) -> str:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code} {error.reason}"


def _run(command: tuple[str, ...], body: bytes) -> str:
    ended = subprocess.run(command, input=body, capture_output=True, timeout=TIMEOUT_S, check=False)
    if ended.returncode == 0:
        return ""
    said = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"it ended with {ended.returncode}" + (f": {said}" if said else "")
