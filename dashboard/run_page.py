"""One run, live: the arrangement of its panels, the window of iterations, and the pause."""

from __future__ import annotations

import streamlit as st

from unskew.dashboard import (
    curves,
    data,
    dialogs,
    event_tail,
    headline,
    heatmap,
    kpis,
    plan_view,
    proposals,
    records,
    timeline,
)
from unskew.dashboard.data import Snapshot
from unskew.dashboard.theme import Tone, card, chip
from unskew.dashboard.wording import ago

TICK_S = 1.0
WINDOWS = {"60": "Last 60", "200": "Last 200", "all": "All", "chosen": "Around chosen"}
AROUND = 30
STATES: dict[str, Tone] = {
    "running": "ok",
    "done": "quiet",
    "stopped": "quiet",
    "failed": "bad",
    "lost": "bad",
    "silent": "warn",
}


def controls() -> None:
    """What stands in the header: the window of iterations, and Live or Paused."""
    st.space("stretch")
    st.segmented_control(
        "Iterations", list(WINDOWS), default="200", format_func=WINDOWS.__getitem__, key="window", bind="query-params",
        label_visibility="collapsed", required=True, width="content",
    )  # fmt: skip
    st.segmented_control(
        "Updates", ["Live", "Paused"], default="Live", key="live", bind="query-params", label_visibility="collapsed",
        required=True, width="content",
    )  # fmt: skip


def show(run: str) -> None:
    """The page of `run`; it ticks while it is live and the run goes on."""
    live = st.session_state["live"] == "Live" and data.snapshot(run).story.finished is None
    st.fragment(_body, run_every=TICK_S if live else None)(run)


def _body(run: str) -> None:
    snapshot = _moment(run)
    window = _window(snapshot)
    _status(snapshot)
    headline.show(snapshot)
    kpis.show(snapshot)
    for wide, narrow in ((heatmap.show, proposals.show), (curves.show_times, curves.show_loss)):
        left, right = st.columns([2, 1], gap="small")
        with left:
            wide(snapshot, window)
        with right:
            narrow(snapshot, window)
    plan_view.show(snapshot)
    timeline.show(snapshot)
    with card("records"):
        decisions, verdicts, events = st.tabs(
            ["Decisions", "Verdicts", "Events"], key="record", bind="query-params", on_change="rerun"
        )
        with decisions:
            records.show_decisions(snapshot)
        with verdicts:
            records.show_verdicts(snapshot)
        with events:
            event_tail.show(snapshot)


def _moment(run: str) -> Snapshot:
    """Now, or the moment at which the page was paused."""
    held: Snapshot | None = st.session_state.get("held")
    if st.session_state["live"] == "Live":
        held = None
    elif held is None or held.run != run:
        held = data.snapshot(run)
    st.session_state["held"] = held
    return held or data.snapshot(run)


def state_of(snapshot: Snapshot) -> str:
    """running, silent, lost, done, failed or stopped."""
    if snapshot.story.finished is not None:
        return snapshot.story.finished.status
    if not snapshot.controlled:
        return "lost"
    return "silent" if snapshot.age_s > headline.NO_NEWS_S else "running"


def _status(snapshot: Snapshot) -> None:
    """State, freshness, device and mode in a line."""
    state = state_of(snapshot)
    started = snapshot.story.started
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="status"):
        chips = chip(state, STATES[state]) + chip(f"last event {ago(snapshot.age_s)}")
        if started is not None:
            chips += chip(f"{started.device} device, {started.ranks} ranks")
        st.html(f'<div class="u-chips">{chips}</div>', width="content")
        why_not = dialogs.why_disabled(snapshot)
        if st.button(f"Mode: {snapshot.story.mode}", key="mode", disabled=why_not is not None, help=why_not):
            dialogs.change_mode(snapshot.run, snapshot.story.mode)


def _window(snapshot: Snapshot) -> range:
    last = snapshot.latest.iteration if snapshot.latest is not None else 0
    size = str(st.session_state["window"])
    chosen = st.session_state.get("iteration")
    if size == "chosen" and chosen is not None:
        return range(max(0, chosen - AROUND), min(last, chosen + AROUND) + 1)
    sizes = {"all": last + 1, "chosen": 2 * AROUND}
    return range(max(0, last + 1 - sizes.get(size, int(size) if size.isdigit() else 0)), last + 1)
