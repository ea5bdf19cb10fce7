"""All runs of the store, and the choice of one, which the address keeps (`?run=`)."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import streamlit as st

from unskew.dashboard import data
from unskew.dashboard.run_state import TONES, state_of
from unskew.dashboard.theme import card, chip, empty, escape, table, title
from unskew.dashboard.wording import ago, device_kind


def choose() -> str | None:
    """The header's run selector; None = show the list."""
    chosen: str | None = st.selectbox(
        "Run", data.runs()["run"].to_list(), index=None, placeholder="All runs", key="run", bind="query-params",
        label_visibility="collapsed", width=280,
    )  # fmt: skip
    return chosen


@st.fragment(run_every=2.0)
def show() -> None:
    """The list, newest first; each name is a link to its run."""
    with card("runs"):
        title("Runs", str(data.store().root))
        runs = data.runs()
        if runs.is_empty():
            empty("0 runs in this store. Start one with `unskew run`, or name another store in $UNSKEW_STORE.")
            return
        head = ["Run", "State", "Last event", "Iterations", "Ranks", "Device", "Mode", "Started"]
        rows = [_row(run, time.time()) for run in runs.iter_rows(named=True)]
        st.html(table(head, rows, numeric=frozenset({3, 4})))


def _row(run: dict[str, Any], now_s: float) -> list[str]:
    """The cells of a run, from a row of the view `runs`."""
    age_s = now_s - run["last_us"] / 1e6
    state = state_of(run["status"] if run["finished_us"] is not None else None, data.controlled(run["run"]), age_s)
    target = json.loads(run["options"]).get("iterations")
    started = datetime.fromtimestamp(run["started_us"] / 1e6, tz=UTC).astimezone()
    return [
        f'<a href="?run={quote(run["run"])}"><b>{escape(run["run"])}</b></a>',
        chip(state, TONES[state]),
        ago(age_s),
        f"{run['iterations']:,}" + (f' <span class="u-muted">of {target:,}</span>' if target else ""),
        str(run["ranks"]),
        f'<span title="{escape(run["device"])}">{escape(device_kind(run["device"]))}</span>',
        escape(run["mode"]),
        f"{started:%Y-%m-%d %H:%M}",
    ]
