"""What `unskew diagnose` found afterwards in the run's log: what was wrong, who did it, what it cost, what remains unknown."""

from __future__ import annotations

from typing import Any

import streamlit as st

from unskew.collector.events import Diagnosed
from unskew.dashboard.data import Snapshot, store
from unskew.dashboard.theme import card, chip, empty, escape, title
from unskew.dashboard.wording import CAUSES

LEAST_SHARE = 0.001
"""Causes that took less of the time lost than this are not listed."""


def show(snapshot: Snapshot) -> None:
    """The card of an imported run, in the place of proposals that nobody makes for it."""
    with card("diagnosis"):
        title("Diagnosis")
        body(snapshot)


def body(snapshot: Snapshot) -> None:
    """The newest diagnosis, or how to get one."""
    found = snapshot.state.diagnosed
    if found is None:
        empty("Not asked for yet. A diagnosis reports what was wrong, who did it and what it cost:")
        st.code(f"unskew diagnose {snapshot.run} --store {store().root}", language=None, wrap_lines=True)
        return
    verdicts = "".join(_verdict(verdict) for verdict in found.verdicts) or f"<p>{escape(snapshot.outcome.sentence)}</p>"
    st.html(f'<div class="u-text">{verdicts}</div>{_lost(found)}{_open(found)}')


def sentence(verdict: dict[str, Any]) -> str:
    """A verdict's sentence as one by itself."""
    text = str(verdict["sentence"])
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def _verdict(verdict: dict[str, Any]) -> str:
    cause = chip(CAUSES.get(verdict["cause"], verdict["cause"]), "warn")
    step = verdict.get("evidence", {}).get("next_step")
    following = f'<p class="u-muted">Next: {escape(step)}</p>' if step else ""
    return f"<p>{cause} {escape(sentence(verdict))}</p>{following}"


def _lost(found: Diagnosed) -> str:
    whole = sum(abs(seconds) for seconds in found.time_lost_s.values())
    rows = [
        f"<div><span>{escape(CAUSES.get(cause, cause.replace('_', ' ')))}</span><b>{seconds:,.1f} s</b></div>"
        for cause, seconds in found.time_lost_s.items()
        if abs(seconds) > LEAST_SHARE * whole
    ]
    if not rows:
        return ""
    return f'<p class="u-muted u-over">Time lost against ideal, in device-seconds</p><div class="u-facts">{"".join(rows)}</div>'


def _open(found: Diagnosed) -> str:
    if not found.abstained:
        return ""
    items = "".join(f"<li>{escape(reason)}</li>" for reason in found.abstained)
    return f'<details class="u-more"><summary>What cannot be said ({len(found.abstained)})</summary><ul>{items}</ul></details>'
