"""The verdict in a sentence: what is wrong, who did it, who only suffers, since when, and what was done about it."""

from __future__ import annotations

import msgspec
import polars as pl
import streamlit as st

from unskew.analytics.core.run_state import RunState, VerdictState
from unskew.collector.events import Verdict
from unskew.dashboard.data import Snapshot
from unskew.dashboard.run_status import NO_NEWS_S, OUTCOME_TONES, imported
from unskew.dashboard.theme import Tone, chip, escape
from unskew.dashboard.wording import CAUSES, ago, count, parties, speeds

RECENT = 20


class Headline(msgspec.Struct, frozen=True):
    """`notes` are further sentences, `chips` short facts with their tone."""

    tone: Tone
    sentence: str
    chips: tuple[tuple[str, Tone], ...] = ()
    notes: tuple[str, ...] = ()


def decide(snapshot: Snapshot) -> Headline:
    """The headline: one sentence on top of the page.

    In this order: a run that writes nothing (never began, lost its controller, fell silent), the newest open verdict, else well
    down to what would have been seen, or why it cannot be judged (analytics/core/outcome.py).
    """
    state = snapshot.state
    silent = f"The last event came {ago(snapshot.age_s)}."
    if state.started is None:
        return Headline("quiet", "The run has not started yet: 0 events matched.")
    if state.finished is None and not snapshot.controlled:
        return Headline(
            "bad", "The controller is gone; the run ended without saying so.", notes=(silent, *_verdict_notes(state))
        )
    if state.finished is not None and state.finished.status == "failed":
        return Headline("bad", f"The run failed: {state.finished.reason or 'no reason given'}", notes=_verdict_notes(state))
    if state.finished is None and snapshot.age_s > NO_NEWS_S:
        return Headline("warn", f"Nothing has been heard of this run for {snapshot.age_s:.0f} s.", notes=_verdict_notes(state))
    if state.open_verdicts:
        return _of_verdict(state.open_verdicts[-1], state)
    return _of_outcome(snapshot)


def _of_verdict(judged: VerdictState, state: RunState) -> Headline:
    verdict, answer = judged.verdict, state.answer_to(judged.verdict)
    facts: list[tuple[str, Tone]] = [(CAUSES[verdict.cause], "bad" if verdict.cause in ("dead", "hung") else "warn")]
    if verdict.speed:
        facts.append((speeds(verdict.speed), "warn"))
    facts.append((f"since iteration {verdict.since_iteration}", "quiet"))
    facts.append((f"confidence {verdict.confidence:.0%}".replace("%", " %"), "quiet"))
    notes = []
    if verdict.victims:
        verb = "waits" if len(verdict.victims) == 1 and verdict.victims[0].kind == "device" else "wait"
        if state.finished is not None or answer is not None:
            verb = "waited"
        who = parties(verdict.victims)
        notes.append(f"{who[0].upper()}{who[1:]} only {verb} for it: victims, not at fault.")
    tone: Tone = "bad" if verdict.cause in ("dead", "hung") else "warn"
    if answer is not None:
        tone = "info"
        facts.append((f"answered by plan {answer}", "info"))
    elif any(proposal.proposed.verdict == verdict.verdict for proposal in state.open_proposals):
        facts.append(("a proposal waits for you", "info"))
    return Headline(tone, sentence(verdict), tuple(facts), (*notes, *_verdict_notes(state, but=judged)))


def sentence(verdict: Verdict) -> str:
    """The detector's own sentence, as one by itself."""
    return verdict.sentence[:1].upper() + verdict.sentence[1:].removesuffix(".") + "."


def _of_outcome(snapshot: Snapshot) -> Headline:
    state, found = snapshot.state, snapshot.outcome
    facts: list[tuple[str, Tone]] = []
    if state.finished is None:
        facts.append((f"{count(len(state.last_roles) - len(state.lost), 'rank')} at work", "quiet"))
        facts += [] if snapshot.judged.is_empty() else [(furthest(snapshot.judged), "quiet")]
    else:
        how = "imported" if imported(state) else state.finished.status
        facts.append((f"{how}, {count(state.finished.iterations, 'iteration')}", "quiet"))
        if state.diagnosed is not None:
            facts.append(("diagnosed afterwards", "quiet"))
    closed = len(state.verdicts) - len(state.open_verdicts)
    notes = [f"{count(closed, 'verdict')} before, closed by now."] if closed else []
    return Headline(OUTCOME_TONES[found.outcome], found.sentence, tuple(facts), (*notes, *_verdict_notes(state)))


def furthest(judged: pl.DataFrame) -> str:
    """The rank furthest from its prediction, in the mean of the last iterations."""
    recent = judged.filter(pl.col("iteration") > pl.col("iteration").max() - RECENT, pl.col("predicted_us") > 0)
    ratios = recent.group_by("rank").agg((pl.col("measured_us").sum() / pl.col("predicted_us").sum()).alias("ratio"))
    rank, ratio = ratios.sort((pl.col("ratio") - 1).abs(), "rank").row(-1)
    return f"furthest off: rank {rank} at {ratio:.2f} of its predicted time"


def _verdict_notes(state: RunState, but: VerdictState | None = None) -> tuple[str, ...]:
    """The other open verdicts, newest first."""
    others = [sentence(j.verdict) for j in reversed(state.open_verdicts) if j is not but]
    return tuple(f"Open verdict: {sentence}" for sentence in others[:2])


def show(snapshot: Snapshot) -> None:
    """Draw the headline."""
    headline = decide(snapshot)
    chips = "".join(chip(text, tone) for text, tone in headline.chips)
    notes = "".join(f'<div class="u-note">{escape(note)}</div>' for note in headline.notes)
    st.html(
        f'<div class="u-verdict u-edge-{headline.tone}" role="status" data-testid="headline"><div>'
        f'<p class="u-sentence">{escape(headline.sentence)}</p>'
        f'<div class="u-chips">{chips}</div>{notes}</div></div>'
    )
