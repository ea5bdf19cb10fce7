"""Telling somebody of an alert: a command that gets it as JSON on stdin, or a webhook that gets it by POST.

What failed for certain is tried again. What may have arrived, because it was cut while nobody had answered, is not: it would be
delivered twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import IO, Literal

import msgspec

from unskew.collector.alerts.rules import Rule

TIMEOUT_S = 10.0
PAUSES_S = (0.5, 2.0)
"""Before the second and the third try."""
_DETAIL = 300
"""Characters kept of a command's last line: the log keeps it for ever."""


class AlertMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What is delivered. `alert` names the opening; its closing has the same."""

    alert: str
    phase: Literal["opened", "closed"]
    run: str
    rule: str
    subject: str
    text: str
    at_us: int


class DeliveryResult(msgspec.Struct, frozen=True):
    ok: bool
    tries: int
    detail: str = ""


class _OutcomeUnknownError(Exception):
    """Nobody knows whether it arrived."""


def deliver(rule: Rule, message: msgspec.Struct) -> DeliveryResult:
    """Deliver it; what fails for certain is tried again, up to three times in all. Blocks meanwhile."""
    detail = ""
    for number, pause_s in enumerate((0.0, *PAUSES_S), start=1):
        time.sleep(pause_s)
        try:
            detail = _try(rule, msgspec.json.encode(message))
        except _OutcomeUnknownError as unknown:
            return DeliveryResult(False, number, f"{unknown}, so it may have arrived and is not delivered again")
        if not detail:
            return DeliveryResult(True, number)
    return DeliveryResult(False, 1 + len(PAUSES_S), detail)


def _try(rule: Rule, body: bytes) -> str:
    """What went wrong for certain; empty when nothing did. Raises `_OutcomeUnknownError`."""
    try:
        return _post(rule.webhook, body) if rule.webhook else _run(rule.command, body)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise _OutcomeUnknownError(f"it took longer than {TIMEOUT_S:g} s") from error
    except urllib.error.URLError as error:  # no connection, or one that broke before all was sent
        return str(error.reason)
    except (ConnectionError, HTTPException) as error:
        raise _OutcomeUnknownError(f"it broke off or answered no HTTP ({type(error).__name__})") from error
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST arrives as a GET without the alert."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def _post(address: str, body: bytes) -> str:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with _opener.open(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code} {error.reason}"


def _run(command: tuple[str, ...], body: bytes) -> str:
    # Files, not pipes: what the command leaves running in the background may hold them open for ever.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(body)
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
            raise
        return "" if status == 0 else f"it ended with {status}" + _last_line(errors)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(errors.seek(0, os.SEEK_END) - 4 * _DETAIL, 0))
    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f": {last[-_DETAIL:]}" if last else ""
