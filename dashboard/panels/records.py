"""The record: every decision with who, when, why and its effect, and every verdict with its score."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import streamlit as st

from unskew.collector.events import (
    CommandRefused,
    ModeChanged,
    Note,
    PlanApplied,
    PlanApproved,
    PlanExpired,
    PlanFailed,
    PlanRejected,
)
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels.proposals import scored_words
from unskew.dashboard.run_state import imported
from unskew.dashboard.story import Judged, Logged, Story
from unskew.dashboard.theme import Tone, chip, empty, escape, table
from unskew.dashboard.wording import CAUSES, count, parties, speeds

SHOWN = 50
TONES: dict[str, Tone] = {"approved": "ok", "applied": "info", "rejected": "bad", "refused": "bad", "failed": "bad"}
WORDS = {
    PlanApproved: "approved",
    PlanRejected: "rejected",
    PlanExpired: "expired",
    PlanFailed: "failed",
    PlanApplied: "applied",
}


class DecisionRow(msgspec.Struct, frozen=True):
    """One decision as a row."""

    at_us: int
    what: str
    word: str
    by: str
    why: str
    effect: str = ""


def show_decisions(snapshot: Snapshot) -> None:
    """Newest first."""
    found = [record for entry in reversed(snapshot.story.log) if (record := decision(entry, snapshot.story)) is not None]
    if not found:
        empty("0 decisions so far.")
        return
    rows = [
        [
            _still(clock(r.at_us)),
            _still(r.what),
            chip(r.word, TONES.get(r.word, "quiet")),
            _still(r.by),
            escape(r.why),
            escape(r.effect),
        ]
        for r in found[:SHOWN]
    ]
    st.html(table(["When", "What", "Decision", "By", "Why", "Effect measured after"], rows))


def decision(entry: Logged, story: Story) -> DecisionRow | None:
    """The row of an event that is a decision. A minimal recovery is one of the controller's own."""
    event, at_us = entry.event, entry.at_us
    match event:
        case PlanApproved() | PlanRejected() | PlanExpired() | PlanFailed() | PlanApplied():
            return _of_plan(entry, event, story)
        case ModeChanged():
            return DecisionRow(at_us, "mode", event.mode, event.by, event.reason)
        case Note():
            return DecisionRow(at_us, "note", "note", event.by, event.text)
        case CommandRefused():
            return DecisionRow(at_us, f"command {event.command}", "refused", event.by, event.reason)
    return None


def _of_plan(
    entry: Logged, event: PlanApproved | PlanRejected | PlanExpired | PlanFailed | PlanApplied, story: Story
) -> DecisionRow | None:
    change = next((change for change in story.changes if change.proposed.proposal == event.proposal), None)
    applied = isinstance(event, PlanApplied)
    if applied and (change is None or change.proposed.optional):
        return None  # the first plan, or one whose approval has a row already
    what = f"proposal {event.proposal}" + (f", plan {change.proposed.plan_version}" if change is not None else "")
    scored = change.scored if change is not None and isinstance(event, PlanApproved | PlanApplied) else None
    effect = scored_words(scored) if scored is not None else ""
    return DecisionRow(entry.at_us, what, WORDS[type(event)], getattr(event, "by", entry.actor), event.reason, effect)


def show_verdicts(snapshot: Snapshot) -> None:
    """Newest first, each against the injected truth where there is one."""
    verdicts = snapshot.story.verdicts
    if not verdicts:
        empty("0 verdicts: nobody judged it." if imported(snapshot.story) else "0 verdicts so far: nothing was found wrong.")
        return
    rows = [_verdict(judged) for judged in reversed(verdicts)]
    head = ["When", "Culprit", "Cause", "Speed", "Since", "Until", "Victims", "Answer", "Score against the truth"]
    st.html(table(head, rows[:SHOWN]))


def _verdict(judged: Judged) -> list[str]:
    verdict = judged.verdict
    until = judged.closed.until_iteration if judged.closed is not None else verdict.until_iteration
    speed = speeds(verdict.speed).removeprefix("speed ") if verdict.speed else ""
    return [
        _still(clock(judged.at_us)),
        _still(parties(verdict.culprits)),
        chip(CAUSES[verdict.cause], "bad" if verdict.cause in ("dead", "hung") else "warn"),
        _still(speed or "–"),
        str(verdict.since_iteration),
        str(until) if until is not None else "open" if judged.is_open else "rejoined",
        _still(parties(verdict.victims) if verdict.victims else "–"),
        _still(f"plan {judged.answer}") if judged.answer is not None else "–",
        _score(judged),
    ]


def _score(judged: Judged) -> str:
    scored = judged.scored
    if scored is None:
        return '<span class="u-muted">not scored yet</span>'
    if not scored.correct:
        return chip("false verdict" if scored.truth is None else "wrong", "bad")
    facts = []
    if scored.delay_iterations is not None:
        facts.append(f"found after {count(scored.delay_iterations, 'iteration')}")
    if scored.speed_error is not None:
        facts.append(f"speed off by {abs(scored.speed_error):.2f}")
    return chip("right", "ok") + f' <span class="u-muted">{escape(", ".join(facts))}</span>'


def clock(at_us: int) -> str:
    """Wall time of the viewer's machine as "14:03:22"."""
    return f"{datetime.fromtimestamp(at_us / 1e6, tz=UTC).astimezone():%H:%M:%S}"


def _still(text: str) -> str:
    return f'<span class="u-nowrap">{escape(text)}</span>'
