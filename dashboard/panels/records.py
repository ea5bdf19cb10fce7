"""The record: every decision with who, when, why and its effect, and every verdict with its score."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import streamlit as st

from unskew.analytics.core.run_state import LoggedControl, RunState, VerdictRevision, VerdictState
from unskew.collector.events import (
    CommandRefused,
    ModeChanged,
    Note,
    PlanApplied,
    PlanApproved,
    PlanExpired,
    PlanFailed,
    PlanRejected,
    Probed,
    Verdict,
    VerdictScored,
)
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels.proposals import scored_words
from unskew.dashboard.run_status import imported
from unskew.dashboard.theme import Tone, chip, empty, escape, table
from unskew.dashboard.wording import CAUSES, count, culprits, parties, speeds

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
    found = [record for entry in reversed(snapshot.log) if (record := decision(entry, snapshot.state)) is not None]
    if not found:
        empty("0 decisions." if snapshot.over else "0 decisions so far.")
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


def decision(entry: LoggedControl, state: RunState) -> DecisionRow | None:
    """The row of an event that is a decision. A minimal recovery is one of the controller's own."""
    event, at_us = entry.event, entry.at_us
    match event:
        case PlanApproved() | PlanRejected() | PlanExpired() | PlanFailed() | PlanApplied():
            return _of_plan(entry, event, state)
        case ModeChanged():
            return DecisionRow(at_us, "mode", event.mode, event.by, event.reason)
        case Note():
            return DecisionRow(at_us, "note", "note", event.by, event.text)
        case CommandRefused():
            return DecisionRow(at_us, f"command {event.command}", "refused", event.by, event.reason)
        case Probed():
            return DecisionRow(at_us, "probe", "measured", entry.actor, _found(event), f"held up {event.cost_us / 1e3:.0f} ms")
    return None


def _found(event: Probed) -> str:
    than = "the others' time" if event.beside else "its healthy time"
    found = (f"rank {rank}: {slowdown:.2f} of {than} for a product" for rank, slowdown in event.slowdowns.items())
    return ", ".join(found) or "nothing could be compared"


def _of_plan(
    entry: LoggedControl, event: PlanApproved | PlanRejected | PlanExpired | PlanFailed | PlanApplied, state: RunState
) -> DecisionRow | None:
    proposal = state.proposals.get(event.proposal)
    applied = isinstance(event, PlanApplied)
    if applied and (proposal is None or proposal.proposed.optional):
        return None  # the first plan, or one whose approval has a row already
    what = f"proposal {event.proposal}" + (f", plan {proposal.proposed.plan_version}" if proposal is not None else "")
    scored = proposal.scored if proposal is not None and isinstance(event, PlanApproved | PlanApplied) else None
    effect = scored_words(scored) if scored is not None else ""
    return DecisionRow(entry.at_us, what, WORDS[type(event)], getattr(event, "by", entry.actor), event.reason, effect)


def show_verdicts(snapshot: Snapshot) -> None:
    """Every revision, newest first, each against the injected truth where there is one."""
    state = snapshot.state
    verdicts = [(revision, verdict) for verdict in state.verdicts.values() for revision in verdict.revisions]
    verdicts.sort(key=lambda one: one[0].at_us)
    if not verdicts:
        none = "0 verdicts." if snapshot.over else "0 verdicts so far."
        empty("0 verdicts: nobody judged it." if imported(state) else f"{none} {snapshot.outcome.sentence}")
        return
    rows = [_verdict(*one, state) for one in reversed(verdicts)]
    head = ["When", "Culprit", "Cause", "Speed", "Since", "Until", "Victims", "Answer", "Score against the truth"]
    st.html(table(head, rows[:SHOWN]))


def _verdict(revision: VerdictRevision, whole: VerdictState, state: RunState) -> list[str]:
    verdict, until = revision.verdict, whole.verdict.until_iteration
    speed = speeds(verdict.speed).removeprefix("speed ") if verdict.speed else ""
    return [
        _still(clock(revision.at_us)),
        _still(culprits(verdict)),
        chip(CAUSES[verdict.cause], "bad" if verdict.cause in ("dead", "hung") else "warn"),
        _still(speed or "–"),
        str(verdict.since_iteration),
        str(until) if until is not None else "open" if state.is_open(whole) else "rejoined",
        _still(parties(verdict.victims) if verdict.victims else "–"),
        _still(_answer(verdict, state)),
        _score(whole.scored),
    ]


def _answer(verdict: Verdict, state: RunState) -> str:
    """What was done about a verdict, or waits to be decided."""
    if state.waiting is not None and verdict.verdict in state.waiting.answers:
        return f"{state.waiting.proposed.proposal} waits"
    answer = state.answer_to(verdict)
    return "–" if answer is None else f"plan {answer}"


def _score(scored: VerdictScored | None) -> str:
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
