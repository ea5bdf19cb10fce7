"""Proposals: what would change, what it gains and costs, and what became of it once somebody decided."""

from __future__ import annotations

from functools import partial

import streamlit as st

from unskew.analytics.core.run_state import ProposalState
from unskew.collector.events import PlanExpired, PlanRejected, PlanScored
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels import dialogs
from unskew.dashboard.theme import card, chip, empty, escape, title
from unskew.dashboard.wording import CAUSES, count, duration, parties, signed_percent

LEAST_RISK = 0.005
"""A risk below this is left out: it would be shown as 0 %."""


def show(snapshot: Snapshot) -> None:
    """Every open proposal with its buttons, else the newest decided one with its history."""
    proposals = [*snapshot.state.proposals.values()]
    with card("proposals"):
        if not proposals:
            title("Proposals")
            empty(_none_yet(snapshot))
            return
        for proposal in snapshot.state.open_proposals or proposals[-1:]:
            _card(snapshot, proposal)


def _none_yet(snapshot: Snapshot) -> str:
    if snapshot.over:
        return "0 proposals were made in this run."
    return "0 proposals yet. One appears here when a change of plan would repay its cost."


def _card(snapshot: Snapshot, proposal: ProposalState) -> None:
    proposed = proposal.proposed
    kind = "optional" if proposed.optional else "recovery"
    title(f"Proposal {proposed.proposal}", f"plan {proposed.plan_version} · {kind} · iteration {proposed.at_iteration}")
    words = f'<div class="u-text"><p>{escape(proposed.reason)}</p>{_answers(snapshot, proposal)}{_what(proposal)}</div>'
    st.html(f'<div data-testid="proposal" data-state="{proposal.status}">{words}{facts(proposal)}</div>')
    if proposal.status == "open":
        _buttons(snapshot, proposal)
    else:
        _steps(proposal)


def _answers(snapshot: Snapshot, proposal: ProposalState) -> str:
    """The verdicts that it is for, in a line."""
    verdicts = (state.verdict for number, state in snapshot.state.verdicts.items() if number in proposal.answers)
    named = "; ".join(f"{parties(verdict.culprits)}, {CAUSES[verdict.cause]}" for verdict in verdicts)
    return f'<p class="u-muted">For {escape(named)}.</p>' if named else ""


def _what(proposal: ProposalState) -> str:
    """The changes, a line each; folded up once somebody decided."""
    if not proposal.proposed.change:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in proposal.proposed.change.replace("->", "→").split("; "))
    unfolded = " open" if proposal.status == "open" else ""
    return f'<details class="u-more"{unfolded}><summary>What changes</summary><ul>{items}</ul></details>'


def facts(proposal: ProposalState) -> str:
    """Iteration time now and then, cost, payback, as HTML."""
    proposed = proposal.proposed
    pairs = [("time with it", duration(proposed.predicted_us))]
    if proposed.baseline_us is not None:
        pairs.insert(0, ("time without it", duration(proposed.baseline_us)))
    if proposed.gain_percent is not None:
        pairs.append(("change", signed_percent(-proposed.gain_percent / 100)))
    pairs.append(("cost, once", duration(proposed.cost_us)))
    if proposed.payback_iterations is not None:
        pairs.append(("repaid after", count(proposed.payback_iterations, "iteration")))
    life, risk = proposed.evidence.get("life_iterations"), proposed.evidence.get("risk")
    if life is not None:
        pairs.append(("gain lasts about", count(round(life), "iteration")))
    if risk is not None and risk >= LEAST_RISK:
        pairs.append(("risk not repaid", f"{100 * risk:.0f} %"))
    return (
        '<div class="u-facts">' + "".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in pairs) + "</div>"
    )


def _steps(proposal: ProposalState) -> None:
    """proposed, approved, applied, scored: as far as it came, and where it stopped."""
    html = "".join(
        f'<div class="{look}"><i></i><span>{escape(name)} <em>{escape(detail)}</em></span></div>'
        for look, name, detail in steps(proposal)
    )
    st.html(f'<div class="u-steps">{html}</div>')


def steps(proposal: ProposalState) -> list[tuple[str, str, str]]:
    """(look, step, what is known of it) from the proposal to its score."""
    proposed, decision, applied = proposal.proposed, proposal.decision, proposal.applied
    found = [("u-done", "proposed", f"at iteration {proposed.at_iteration}")]
    if isinstance(decision, PlanRejected | PlanExpired):
        by = f"by {decision.by}: " if isinstance(decision, PlanRejected) else ""
        return [*found, ("u-stop", proposal.status, f"{by}{decision.reason}")]
    if decision is not None:
        found.append(("u-done", "approved", f"by {decision.by}: {decision.reason}"))
    elif proposed.optional:
        found.append(("", "approved", ""))
    if proposal.failed is not None:
        return [*found, ("u-stop", "failed", proposal.failed.reason)]
    found.append(("u-done", "applied", f"at iteration {applied.iteration}") if applied is not None else ("", "applied", ""))
    found.append(("u-done", "scored", scored_words(proposal.scored)) if proposal.scored is not None else ("", "scored", ""))
    return found


def scored_words(scored: PlanScored | None) -> str:
    """ "−0.41 s per iteration (−0.44 to −0.38)": what the change did, negative = faster."""
    if scored is None:
        return "scored"
    if scored.void is not None:
        return f"no score: {scored.void}"
    if scored.effect_s is None:
        return "scored: no effect measured"
    gain = f"{_seconds(-scored.effect_s)} per iteration"
    if scored.interval_s is not None:
        low, high = sorted(-value for value in scored.interval_s)
        gain += f" ({_seconds(low).removesuffix(' s')} to {_seconds(high)})"
    return gain


def _seconds(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{abs(value):.2f} s"


def _buttons(snapshot: Snapshot, proposal: ProposalState) -> None:
    name = proposal.proposed.proposal
    sent = {"approve": "approval", "reject": "rejection"}.get(st.session_state.get("sent", {}).get((snapshot.run, name), ""))
    if proposal.refused is not None:
        by_auto = proposal.refused.by == "auto"
        why = proposal.refused.reason
        st.html(chip(why, "warn") if by_auto else chip(f"the controller refused: {why}", "bad"))
    elif proposal.note is not None:
        st.html(chip(proposal.note.text, "info"))
    elif sent:
        st.html(chip(f"{sent} sent, waiting for the controller", "info"))
    why_not = dialogs.why_disabled(snapshot)
    with st.container(horizontal=True, gap="small"):
        off = why_not is not None or sent is not None
        if st.button("Approve", key=f"approve-{name}", type="primary", disabled=off, help=why_not):
            dialogs.ask(partial(dialogs.approve, snapshot.run, proposal))
        if st.button("Reject", key=f"reject-{name}", disabled=off, help=why_not):
            dialogs.ask(partial(dialogs.reject, snapshot.run, proposal))
    if why_not is not None:
        st.html(f'<p class="u-empty">{escape(why_not)}</p>')
