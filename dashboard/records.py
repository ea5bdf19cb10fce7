"""The record: every decision with who, when, why and its effect, and every verdict with its score."""

from __future__ import annotations

from datetime import UTC, datetime

import streamlit as st

from unskew.collector.events import CommandRefused, ModeChanged, Note, PlanApproved, PlanExpired, PlanRejected
from unskew.dashboard.data import Snapshot
from unskew.dashboard.proposals import scored_words
from unskew.dashboard.story import Judged, Logged, Story
from unskew.dashboard.theme import chip, empty, escape, table
from unskew.dashboard.wording import CAUSES, parties

SHOWN = 50


def show_decisions(snapshot: Snapshot) -> None:
    """Newest first."""
    rows = [row for entry in reversed(snapshot.story.log) if (row := _decision(entry, snapshot.story)) is not None]
    if not rows:
        empty("0 decisions so far.")
        return
    st.html(table(["When", "What", "Decision", "By", "Why", "Effect measured after"], rows[:SHOWN]))


def _decision(entry: Logged, story: Story) -> list[str] | None:
    event = entry.event
    when = clock(entry.at_us)
    if isinstance(event, PlanApproved | PlanRejected | PlanExpired):
        change = next((c for c in story.changes if c.proposed.proposal == event.proposal), None)
        effect = scored_words(change.scored) if change is not None and change.scored is not None else ""
        word = {PlanApproved: "approved", PlanRejected: "rejected", PlanExpired: "expired"}[type(event)]
        what = f"proposal {event.proposal}" + (f", plan {change.proposed.epoch}" if change else "")
        by = "" if isinstance(event, PlanExpired) else event.by
        return _row(when, what, word, by, event.reason, effect)
    if isinstance(event, ModeChanged):
        return _row(when, f"mode {event.mode}", "mode", event.by, event.reason, "")
    if isinstance(event, Note):
        return _row(when, "note", "note", event.by, event.text, "")
    if isinstance(event, CommandRefused):
        return _row(when, f"command {event.command}", "refused", event.by, event.reason, "")
    return None


def _row(when: str, what: str, word: str, by: str, why: str, effect: str) -> list[str]:
    tone = {"approved": "ok", "rejected": "bad", "refused": "bad"}.get(word, "quiet")
    return [_still(when), _still(what), chip(word, tone), escape(by), escape(why), escape(effect)]


def show_verdicts(snapshot: Snapshot) -> None:
    """Newest first, each against the injected truth where there is one."""
    verdicts = snapshot.story.verdicts
    if not verdicts:
        empty("0 verdicts so far: nothing was found wrong.")
        return
    rows = [_verdict(judged) for judged in reversed(verdicts)]
    head = ["When", "Culprit", "Cause", "Speed", "Since", "Until", "Victims", "Answer", "Score against the truth"]
    st.html(table(head, rows[:SHOWN]))


def _verdict(judged: Judged) -> list[str]:
    verdict = judged.verdict
    until = judged.closed.until_iteration if judged.closed is not None else verdict.until_iteration
    speed = ", ".join(f"{kind} {value:.2f}" for kind, value in sorted(verdict.speed.items()))
    return [
        _still(clock(judged.at_us)),
        _still(parties(verdict.culprits)),
        chip(CAUSES[verdict.cause], "bad" if verdict.cause in ("dead", "hung") else "warn"),
        _still(speed or "–"),
        str(verdict.since_iteration),
        "open" if until is None else str(until),
        _still(parties(verdict.victims) if verdict.victims else "–"),
        _still(f"plan {judged.answer}") if judged.answer is not None else "–",
        _score(judged),
    ]


def _score(judged: Judged) -> str:
    scored = judged.scored
    if scored is None:
        return '<span class="u-muted">not scored yet</span>'
    if not scored.correct:
        return chip("false accusation" if scored.truth is None else "wrong", "bad")
    facts = []
    if scored.delay_iterations is not None:
        facts.append(f"after {scored.delay_iterations} iterations")
    if scored.speed_error is not None:
        facts.append(f"speed off by {abs(scored.speed_error):.2f}")
    return chip("right", "ok") + f' <span class="u-muted">{escape(", ".join(facts))}</span>'


def clock(at_us: int) -> str:
    """Wall time of the viewer's machine as "14:03:22"."""
    return f"{datetime.fromtimestamp(at_us / 1e6, tz=UTC).astimezone():%H:%M:%S}"


def _still(text: str) -> str:
    return f'<span class="u-nowrap">{escape(text)}</span>'
