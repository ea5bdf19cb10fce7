"""Everything that the dashboard writes: commands to a run's controller, each with a name and a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import streamlit as st

from unskew.analytics.core.run_state import ProposalState
from unskew.collector.command import Command
from unskew.collector.events import Mode
from unskew.collector.write.commands import CommandError, send
from unskew.dashboard.data import Snapshot, store
from unskew.dashboard.wording import duration

Kind = Literal["approve", "reject", "mode"]

MODES: dict[Mode, str] = {
    "observe": "Observe: nothing is changed; a death stops the run, with its cause named.",
    "approve": "Approve: optional changes wait for a person; after a death the minimal recovery applies at once.",
    "auto": "Auto: changes that repay their cost apply by themselves.",
}


def why_disabled(snapshot: Snapshot) -> str | None:
    """Why no command can be sent, or None."""
    if snapshot.state.finished is not None:
        return "The run is over: nobody is left to carry out a decision."
    if not snapshot.controlled:
        return "The run has no living controller to carry out a decision."
    return None


def ask(dialog: Callable[[], None]) -> None:
    """Open `dialog` over the whole page, with the next full run.

    Not where its button stands: that is a part of the page that redraws itself, and Streamlit leaves out a press in a dialog
    that was opened within such a part whenever a redrawing of the part is due too, which it always is on a busy machine.
    """
    st.session_state["dialog"] = dialog
    st.rerun()


def show_asked() -> None:
    """The dialog that was asked for, once."""
    if (dialog := st.session_state.pop("dialog", None)) is not None:
        dialog()


@st.dialog("Approve this plan?")
def approve(run: str, proposal: ProposalState) -> None:
    """Ask for name and reason, then send."""
    gain = f"{duration(proposal.proposed.predicted_us)} per iteration predicted"
    if proposal.proposed.baseline_us is not None:
        gain += f", {duration(proposal.proposed.baseline_us)} now"
    _decide(run, proposal, "approve", f"{gain}; the change costs {duration(proposal.proposed.cost_us)} once.")


@st.dialog("Reject this plan?")
def reject(run: str, proposal: ProposalState) -> None:
    """Ask for name and reason, then send."""
    _decide(run, proposal, "reject", "The plan in force stays.")


@st.dialog("Change the mode")
def change_mode(run: str, mode: Mode) -> None:
    """Ask for the new mode, name and reason, then send."""
    with st.form("mode", border=False):
        chosen = st.radio("Mode", list(MODES), index=list(MODES).index(mode), format_func=MODES.__getitem__, key="new-mode")
        _sign(run, "mode", chosen, "Change mode")


def _decide(run: str, proposal: ProposalState, kind: Kind, consequence: str) -> None:
    name = proposal.proposed.proposal
    st.write(f"**Proposal {name}.** {proposal.proposed.reason}")
    st.caption(consequence)
    with st.form(kind, border=False):
        _sign(run, kind, name, kind.capitalize())


def _sign(run: str, kind: Kind, target: str, verb: str) -> None:
    """Name, reason and the button that sends. A form, so that a live page's redraws cannot come between typing and sending."""
    by = st.text_input("Your name", value=st.session_state.get("by", ""), key=f"by-{kind}", placeholder="who decides")
    reason = st.text_area("Reason", key=f"reason-{kind}", placeholder="why; it stays in the log", height=90)
    if not st.form_submit_button(verb, type="primary", key=f"send-{kind}"):
        return
    if not (by.strip() and reason.strip()):
        st.error("A name and a reason are both needed: they stay in the log.")
        return
    try:
        send(store(), run, Command(kind=kind, run=run, target=target, by=by.strip(), reason=reason.strip()))
    except CommandError as error:
        st.error(str(error))
        return
    st.session_state["by"] = by.strip()
    st.session_state.setdefault("sent", {})[run, target] = kind
    st.rerun()
