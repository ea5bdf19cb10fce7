"""One run, live: the arrangement of its panels, the window of iterations, and the pause."""

from __future__ import annotations

import streamlit as st

from unskew.dashboard import (
    curves,
    data,
    diagnosis,
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
from unskew.dashboard.run_state import TONES, imported, state_of
from unskew.dashboard.theme import card, chip
from unskew.dashboard.window import Window, around, newest
from unskew.dashboard.wording import ago, count, device_kind

TICK_S = 1.0
WINDOWS = {"Last 60": 60, "Last 200": 200}
ALL, AROUND_CHOSEN = "All", "Around chosen"
AROUND = 30


def controls(run: str) -> None:
    """What stands in the header: the window of iterations, and, while the run goes on, Live or Paused."""
    st.space("stretch")
    st.segmented_control(
        "Iterations", [*WINDOWS, ALL, AROUND_CHOSEN], default="Last 200", key="window", bind="query-params",
        label_visibility="collapsed", required=True, width="content",
    )  # fmt: skip
    if data.snapshot(run).story.finished is None:
        st.segmented_control(
            "Updates", ["Live", "Paused"], default="Live", key="live", bind="query-params", label_visibility="collapsed",
            required=True, width="content",
        )  # fmt: skip


def show(run: str) -> None:
    """The page of `run`; it ticks while it is live and the run goes on."""
    ticking = _live() and data.snapshot(run).story.finished is None
    st.fragment(_body, run_every=TICK_S if ticking else None)(run)


def _live() -> bool:
    return bool(st.session_state.get("live", "Live") == "Live")


def _body(run: str) -> None:
    snapshot = _moment(run)
    window = _window(snapshot)
    _status(snapshot)
    headline.show(snapshot)
    kpis.show(snapshot)
    foreign = imported(snapshot.story)
    for wide, narrow in ((heatmap.show, diagnosis.show if foreign else proposals.show), (curves.show_times, curves.show_loss)):
        left, right = st.columns([2, 1], gap="small")
        with left:
            wide(snapshot, window)
        with right:
            narrow(snapshot, window)
    if not foreign:
        plan_view.show(snapshot)
    timeline.show(snapshot)
    with card("records"):
        decisions, verdicts, diagnosed, events = st.tabs(
            ["Decisions", "Verdicts", "Diagnosis", "Events"], key="record", bind="query-params", on_change="rerun"
        )
        with decisions:
            records.show_decisions(snapshot)
        with verdicts:
            records.show_verdicts(snapshot)
        with diagnosed:
            diagnosis.body(snapshot)
        with events:
            event_tail.show(snapshot)


def _moment(run: str) -> Snapshot:
    """Now, or the moment at which the page was paused."""
    held: Snapshot | None = st.session_state.get("held")
    if _live():
        held = None
    elif held is None or held.run != run:
        held = data.snapshot(run)
    st.session_state["held"] = held
    return held or data.snapshot(run)


def _status(snapshot: Snapshot) -> None:
    """State, freshness, device and mode in a line."""
    started, finished = snapshot.story.started, snapshot.story.finished
    state = state_of(finished.status if finished is not None else None, snapshot.controlled, snapshot.age_s)
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="status"):
        chips = chip(state, TONES[state]) + chip(f"last event {ago(snapshot.age_s)}")
        if started is not None:
            ranks = f", {count(started.ranks, 'rank')}" if started.ranks else ""
            chips += chip(("imported" if imported(snapshot.story) else f"{device_kind(started.device)} device") + ranks)
        if snapshot.n_dropped:
            chips += chip(f"{count(snapshot.n_dropped, 'event')} dropped: a buffer or the disk was full", "bad")
        if snapshot.problems:
            chips += chip(f"{count(len(snapshot.problems), 'problem')} in the log: {snapshot.problems[0]}", "bad")
        st.html(f'<div class="u-chips">{chips}</div>', width="content")
        why_not = dialogs.why_disabled(snapshot)
        if st.button(f"Mode: {snapshot.story.mode}", key="mode", disabled=why_not is not None, help=why_not):
            dialogs.change_mode(snapshot.run, snapshot.story.mode)


def _window(snapshot: Snapshot) -> Window:
    """The iterations shown, from a round one on. Around the chosen one it stands still, however far the run goes on."""
    known = snapshot.iterations["iteration"].to_list() or [0]
    size, chosen = st.session_state["window"], st.session_state.get("iteration")
    if size == AROUND_CHOSEN and chosen is not None:
        return around(known, chosen, AROUND)
    return newest(known, None if size == ALL else WINDOWS.get(size, 2 * AROUND))
