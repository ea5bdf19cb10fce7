"""Everything that the dashboard writes: commands to a run's controller, each with a name and a reason."""

from __future__ import annotations

import time
import uuid
from typing import Literal

import streamlit as st

from unskew.collector.commands import Command, send
from unskew.collector.events import Mode
from unskew.dashboard.data import Snapshot, store
from unskew.dashboard.story import Change
from unskew.dashboard.wording import duration

MODES: dict[Mode, str] = {
    "observe": "Observe: nothing is changed; a death stops the run, with its cause named.",
    "approve": "Approve: optional changes wait for a person; after a death the minimal recovery applies at once.",
    "auto": "Auto: changes that repay their cost apply by themselves.",
}


def why_disabled(snapshot: Snapshot) -> str | None:
    """Why no command can be sent, or None."""
    if snapshot.story.finished is not None:
        return "The run is over: nobody is left to carry out a decision."
    if not snapshot.controlled:
        return "The run has no living controller to carry out a decision."
    return None


def decide(run: str, change: Change, kind: Literal["approve", "reject"]) -> None:
    """Ask for name and reason, then send."""
    st.dialog(f"{kind.capitalize()} proposal {change.proposed.proposal}")(_decide)(run, change, kind)


def _decide(run: str, change: Change, kind: Literal["approve", "reject"]) -> None:
    proposed = change.proposed
    st.write(proposed.reason)
    if kind == "approve" and proposed.gain_percent is not None:
        st.caption(f"Predicted: {duration(proposed.predicted_us)} per iteration, for {duration(proposed.cost_us)} once.")
    signed = _signature(kind.capitalize(), f"{kind}-{proposed.proposal}")
    if signed is not None:
        command(run, kind, proposed.proposal, *signed)
        st.session_state.setdefault("sent", {})[proposed.proposal] = "approval" if kind == "approve" else "rejection"
        st.rerun()


@st.dialog("Change the mode")
def change_mode(run: str, mode: Mode) -> None:
    """Ask for the new mode, name and reason, then send."""
    chosen = st.radio("Mode", list(MODES), index=list(MODES).index(mode), format_func=MODES.__getitem__, key="new-mode")
    signed = _signature("Change mode", "mode", allowed=chosen != mode)
    if signed is not None:
        command(run, "mode", chosen, *signed)
        st.rerun()


def _signature(verb: str, key: str, *, allowed: bool = True) -> tuple[str, str] | None:
    """Name and reason, both required; not None once the button was pressed."""
    by = st.text_input("Your name", value=st.session_state.get("by", ""), key=f"by-{key}", placeholder="who decides")
    reason = st.text_area("Reason", key=f"reason-{key}", placeholder="why; it stays in the log", height=90)
    if st.button(verb, type="primary", key=f"send-{key}", disabled=not allowed):
        if by.strip() and reason.strip():
            st.session_state["by"] = by.strip()
            return by.strip(), reason.strip()
        st.error("A name and a reason are both needed: they stay in the log.")
    return None


def command(run: str, kind: Literal["approve", "reject", "mode", "note"], target: str, by: str, reason: str) -> None:
    """Hand a command to the run's controller."""
    send(
        store(),
        run,
        Command(id=uuid.uuid4().hex, kind=kind, run=run, target=target, by=by, reason=reason, at_us=time.time_ns() // 1000),
    )
