"""One run, live: the arrangement of its panels, the window of iterations, and the pause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import streamlit as st

from unskew.collector.events import DEVICE_NAMES
from unskew.collector.log_gap import dropped_sentence
from unskew.dashboard import data
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels import (
    curves,
    diagnosis,
    dialogs,
    event_tail,
    headline,
    heatmap,
    kpis,
    plan_view,
    proposals,
    records,
    skew,
    timeline,
)
from unskew.dashboard.run_status import TONES, imported, simulated, status_of
from unskew.dashboard.theme import card, chip
from unskew.dashboard.window import Window, around, newest
from unskew.dashboard.wording import ago, count

TICK_S = 1.0
WINDOWS = {"Last 60": 60, "Last 200": 200}
ALL, AROUND_CHOSEN = "All", "Around chosen"
AROUND = 30
Panel = Callable[[], None]


def controls(run: str) -> None:
    """What the header has: the window of iterations, and, while the run goes on, Live or Paused."""
    st.space("stretch")
    st.segmented_control(
        "Iterations", [*WINDOWS, ALL, AROUND_CHOSEN], default="Last 200", key="window", bind="query-params",
        label_visibility="collapsed", required=True, width="content",
    )  # fmt: skip
    if data.snapshot(run).state.finished is None:
        st.segmented_control(
            "Updates", ["Live", "Paused"], default="Live", key="live", bind="query-params", label_visibility="collapsed",
            required=True, width="content",
        )  # fmt: skip


def show(run: str) -> None:
    """The page of `run`; it ticks while it is live and the run goes on."""
    ticking = _live() and data.snapshot(run).state.finished is None
    st.fragment(_body, run_every=TICK_S if ticking else None)(run)
    dialogs.show_asked()


def _live() -> bool:
    return bool(st.session_state.get("live", "Live") == "Live")


def _body(run: str) -> None:
    snapshot = _moment(run)
    window = _window(snapshot)
    _status(snapshot)
    headline.show(snapshot)
    kpis.show(snapshot)
    foreign = imported(snapshot.state)
    cells = heatmap.load(snapshot, window)
    bare = cells.rows.is_empty() and (foreign or simulated(snapshot.state))
    wide = [] if bare else [partial(heatmap.show, snapshot, window, cells)]
    wide.append(partial(curves.show_times, snapshot, window))
    narrow = [partial(diagnosis.show if foreign else proposals.show, snapshot)]
    if not foreign or snapshot.iterations["loss"].count():
        narrow.append(partial(curves.show_loss, snapshot, window))
    _arrange(wide, narrow)
    if not foreign:
        plan_view.show(snapshot)
    skew.show(snapshot, window)
    if not bare and cells.measure == "compute":
        timeline.show(snapshot)
    _records(snapshot)


def _arrange(wide: Sequence[Panel], narrow: Sequence[Panel]) -> None:
    """A wide and a narrow panel side by side, row by row; one without a neighbour takes the row."""
    for left, right in zip_longest(wide, narrow):
        if left is None or right is None:
            (left or right)()
            continue
        columns = st.columns([2, 1], gap="small")
        with columns[0]:
            left()
        with columns[1]:
            right()


def _records(snapshot: Snapshot) -> None:
    shown: dict[str, Callable[[Snapshot], None]] = {
        "Decisions": records.show_decisions,
        "Verdicts": records.show_verdicts,
        "Diagnosis": diagnosis.body,
        "Events": event_tail.show,
    }
    if imported(snapshot.state):
        shown = {"Events": event_tail.show}
    with card("records"):
        tabs = st.tabs(list(shown), key="record", bind="query-params", on_change="rerun")
        for tab, show_record in zip(tabs, shown.values(), strict=True):
            with tab:
                show_record(snapshot)


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
    started, finished = snapshot.state.started, snapshot.state.finished
    state = status_of(finished.status if finished is not None else None, snapshot.controlled, snapshot.age_s)
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="status"):
        foreign = imported(snapshot.state)
        chips = chip(state, TONES[state]) + chip(f"{'imported' if foreign else 'last event'} {ago(snapshot.age_s)}")
        if started is not None:
            device = (
                started.options.get("format", "")
                if foreign
                else f"{DEVICE_NAMES.get(started.device_kind, started.device)} device"
            )
            chips += chip(f"{device}, {count(started.ranks, 'rank')}" if started.ranks else str(device))
        if snapshot.state.dropped:
            chips += chip(dropped_sentence(snapshot.state.dropped), "bad")
        if snapshot.problems:
            chips += chip(f"{count(len(snapshot.problems), 'problem')} in the log: {snapshot.problems[0]}", "bad")
        st.html(f'<div class="u-chips">{chips}</div>', width="content")
        if foreign:
            return
        why_not = dialogs.why_disabled(snapshot)
        if st.button(f"Mode: {snapshot.state.mode}", key="mode", disabled=why_not is not None, help=why_not):
            dialogs.ask(partial(dialogs.change_mode, snapshot.run, snapshot.state.mode))


def _window(snapshot: Snapshot) -> Window:
    """The iterations shown, from a round one on. Around the chosen one it does not move, however far the run goes on."""
    known = snapshot.iterations["iteration"].to_list() or [0]
    size, chosen = st.session_state["window"], st.session_state.get("iteration")
    if size == AROUND_CHOSEN and chosen is not None:
        return around(known, chosen, AROUND)
    return newest(known, None if size == ALL else WINDOWS.get(size, 2 * AROUND))
