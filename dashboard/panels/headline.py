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

    In this order: a run that writes nothing (never began, lost its controller, fell silent) or whose log is not whole, the most
    urgent open verdict, a proposal that waits for a person, else well down to what would have been seen, or why it cannot be
    judged (analytics/core/outcome.py).
    """
    state = snapshot.state
    if state.started is None:
        return Headline("quiet", "The run has not started yet: 0 events matched.")
    return _of_its_log(snapshot) or _of_attention(state) or _of_outcome(snapshot)


def _of_its_log(snapshot: Snapshot) -> Headline | None:
    """What keeps the log from showing how the run is, or how it ended."""
    state, notes = snapshot.state, _verdict_notes(snapshot.state)
    if state.finished is None and not snapshot.controlled:
        silent = f"The last event came {ago(snapshot.age_s)}."
        return Headline("bad", "The controller is gone; the run ended without saying so.", notes=(silent, *notes))
    if state.finished is None and snapshot.age_s > NO_NEWS_S:
        return Headline("warn", f"Nothing has been heard of this run for {snapshot.age_s:.0f} s.", _of_proposal(state), notes)
    lacking = f"The log is incomplete: {_lacking(state)}."
    if state.finished is not None and state.finished.status == "failed":
        failed = f"The run failed: {state.finished.reason or 'no reason given'}"
        return Headline("bad", failed, notes=(*[lacking] * bool(state.log_gap), *notes))
    return Headline("bad", lacking, notes=notes) if state.log_gap else None


def _of_attention(state: RunState) -> Headline | None:
    """What is wrong, and what waits for a person: this comes before what is answered."""
    urgent, waiting = next(iter(state.by_urgency), None), state.waiting
    if urgent is not None and (waiting is None or state.answer_to(urgent.verdict) is None):
        return _of_verdict(urgent, state)
    if waiting is None:
        return None
    proposed = waiting.proposed
    sentence = f"Proposal {proposed.proposal} waits for you: {proposed.change}."
    return Headline("warn", sentence, _of_proposal(state), _verdict_notes(state))


def _lacking(state: RunState) -> str:
    """What is missing, with why where the run says it."""
    over = state.finished
    return over.reason if over is not None and over.status == "incomplete" and over.reason else state.log_gap


def _of_proposal(state: RunState) -> tuple[tuple[str, Tone], ...]:
    """What is to be said of the open proposal: that it waits for a person, or what mode auto noted about it."""
    if state.waiting is not None:
        gain = state.waiting.proposed.gain_percent
        words = f"proposal {state.waiting.proposed.proposal} waits for you"
        return ((words + ("" if gain is None else f": {gain:.0f} % less time"), "warn"),)
    noted = (one.note.text for one in state.open_proposals if one.note is not None) if state.finished is None else ()
    return tuple((text, "info") for text in noted)


def _of_verdict(judged: VerdictState, state: RunState) -> Headline:
    verdict, answer = judged.verdict, state.answer_to(judged.verdict)
    facts = [*_of_proposal(state), (CAUSES[verdict.cause], _tone(verdict))]
    if verdict.speed:
        facts.append((speeds(verdict.speed), "warn"))
    facts.append((judged.onset, "quiet"))
    facts.append((f"confidence {verdict.confidence:.0%}".replace("%", " %"), "quiet"))
    notes = []
    if verdict.victims:
        alone = len(verdict.victims) == 1 and verdict.victims[0].kind == "device"
        verb = "waits" if alone else "wait"
        if state.finished is not None or answer is not None:
            verb = "waited"
        who = parties(verdict.victims)
        notes.append(f"{who[0].upper()}{who[1:]} only {verb} for it: {'a victim' if alone else 'victims'}, not at fault.")
    if answer is not None:
        facts.append((f"answered by plan {answer}", "info"))
    elif step := verdict.evidence.get("next_step"):
        notes.append(f"Next: {step}.")
    settled = answer is not None and state.waiting is None
    tone: Tone = "info" if settled else _tone(verdict)
    return Headline(tone, sentence(verdict), tuple(facts), (*notes, *_verdict_notes(state, but=judged)))


def _tone(verdict: Verdict) -> Tone:
    return "bad" if verdict.cause in ("dead", "hung") else "warn"


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
    # A run that is over counts them among what was wrong, and a live one that is well says it itself.
    in_sentence = state.finished is not None or found.why.endswith("no longer open")
    notes = [f"{count(closed, 'verdict')} before, closed by now."] if closed and not in_sentence else []
    return Headline(OUTCOME_TONES[found.outcome], found.sentence, tuple(facts), (*notes, *_verdict_notes(state)))


def furthest(judged: pl.DataFrame) -> str:
    """The rank furthest from its prediction, in the mean of the last iterations."""
    recent = judged.filter(pl.col("iteration") > pl.col("iteration").max() - RECENT, pl.col("healthy_us") > 0)
    ratios = recent.group_by("rank").agg((pl.col("measured_us").sum() / pl.col("healthy_us").sum()).alias("ratio"))
    rank, ratio = ratios.sort((pl.col("ratio") - 1).abs(), "rank").row(-1)
    return f"furthest off: rank {rank} at {ratio:.2f} of its predicted time"


def _verdict_notes(state: RunState, but: VerdictState | None = None) -> tuple[str, ...]:
    """The other open verdicts, the most urgent first."""
    return tuple(f"Open verdict: {_answered(one.verdict, state)}" for one in state.by_urgency if one is not but)[:2]


def _answered(verdict: Verdict, state: RunState) -> str:
    answer = state.answer_to(verdict)
    return sentence(verdict) + (f" Answered by plan {answer}." if answer is not None else "")


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
