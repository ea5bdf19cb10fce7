"""The life of an alert: on streams of its own, beside runs."""

from __future__ import annotations

from typing import Literal

from unskew.collector.events.base import Control


class AlertOpened(Control, frozen=True, kw_only=True, tag="alert_opened@1"):
    """The condition of rule `rule` holds for `subject` (a rank, a verdict, ...) of the run; delivered once, under name
    `alert`."""

    alert: str
    rule: str
    subject: str
    text: str


class AlertClosed(Control, frozen=True, kw_only=True, tag="alert_closed@1"):
    alert: str
    reason: str


class AlertDelivered(Control, frozen=True, kw_only=True, tag="alert_delivered@1"):
    """How the delivery of an alert's opening or closing went; `tries` 0 = nobody knows, because the process ended meanwhile."""

    alert: str
    phase: Literal["opened", "closed"]
    target: str
    ok: bool
    tries: int
    detail: str = ""
