"""All runs of the store, and the choice of one, which the address keeps (`?run=`)."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import polars as pl
import streamlit as st

from unskew.dashboard import data
from unskew.dashboard.theme import card, empty, title
from unskew.dashboard.wording import ago


def choose() -> str | None:
    """The header's run selector; None = show the list."""
    chosen: str | None = st.selectbox(
        "Run", data.runs()["run"].to_list(), index=None, placeholder="All runs", key="run", bind="query-params",
        label_visibility="collapsed", width=280,
    )  # fmt: skip
    return chosen


@st.fragment(run_every=2.0)
def show() -> None:
    """The list, newest first; a click opens a run."""
    with card("runs"):
        title("Runs", str(data.store().root))
        runs = data.runs()
        if runs.is_empty():
            empty("0 runs in this store. Start one with `unskew run`, or name another store in $UNSKEW_STORE.")
            return
        st.session_state["listed"] = runs["run"].to_list()
        st.dataframe(listing(runs, time.time()), hide_index=True, on_select=_open, selection_mode="single-row", key="runs")
        st.caption("Select a row to open the run.")


def listing(runs: pl.DataFrame, now_s: float) -> pl.DataFrame:
    """The table as shown: one row per run of the view `runs`."""
    return pl.DataFrame(
        {
            "Run": runs["run"],
            "State": [state_of(row["status"], data.controlled(row["run"])) for row in runs.iter_rows(named=True)],
            "Last event": [ago(now_s - last / 1e6) for last in runs["last_us"]],
            "Iterations": runs["iterations"],
            "Ranks": runs["ranks"],
            "Device": runs["device"],
            "Mode": runs["mode"],
            "Started": [f"{datetime.fromtimestamp(at / 1e6, tz=UTC).astimezone():%Y-%m-%d %H:%M}" for at in runs["started_us"]],
        }
    )


def state_of(status: str, controlled: bool) -> str:
    """running, lost (no controller and no farewell), done, failed or stopped."""
    if status != "unfinished":
        return status
    return "running" if controlled else "lost"


def _open() -> None:
    """Put the clicked run into the address."""
    rows = st.session_state["runs"].selection.rows
    if rows and rows[0] < len(st.session_state["listed"]):
        st.session_state["run"] = st.session_state["listed"][rows[0]]
