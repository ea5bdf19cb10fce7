"""All runs of the store, and the choice of one, which the address keeps (`?run=`)."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import streamlit as st

from unskew.analytics.core.outcome import Outcome, outcome_of_run, percent
from unskew.analytics.core.run_state import RunState
from unskew.collector.events import DEVICE_NAMES
from unskew.collector.outcome_words import NO_END
from unskew.dashboard import data
from unskew.dashboard.run_status import OUTCOME_TONES, OUTCOME_WORDS, TONES, status_of
from unskew.dashboard.theme import card, chip, escape, table, title
from unskew.dashboard.wording import CAUSES, ago, count

HISTORY_ROWS = 10
NONE_YET = """<p class="u-empty">0 runs in this store. <code>unskew run</code> starts one, <code>unskew import</code> brings in
a trace of another tool, and $UNSKEW_STORE names another store.</p>"""


def choose() -> str | None:
    """The header's run selector; None = show the list, with a notice when the address names a run that is not there."""
    asked = st.query_params.get("run")
    if asked is not None:
        st.session_state["asked"] = asked
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
        asked = st.session_state.get("asked")
        if asked is not None and asked not in runs["run"]:
            st.html(chip(f"There is no run {asked} in this store.", "warn"))
        if runs.is_empty():
            st.html(NONE_YET)
            return
        head = ["Run", "State", "Outcome", "Last event", "Iterations", "Ranks", "Device", "Mode", "Started"]
        rows = [_row(run, time.time()) for run in runs.iter_rows(named=True)]
        st.html(table(head, rows, numeric=frozenset({4, 5})))
    _history()
    _problems()


def _history() -> None:
    """Repeat offenders: what the devices of all runs had to do with what went wrong."""
    devices = data.history()
    if devices.is_empty():
        return
    with card("history"):
        title("Devices with a history", "lost or flagged, over all runs of this store")
        rows = [
            [
                f"<b>{escape(row['device'])}</b>",
                f"{row['n_runs_affected']} of {row['n_runs']}",
                str(row["n_losses"]),
                str(row["n_verdicts"]),
                escape(", ".join(CAUSES.get(cause, cause) for cause in row["causes"] or [])),
                "–" if row["slowest"] is None else f"{row['slowest']:.2f}",
                ago(time.time() - row["last_trouble_us"] / 1e6),
            ]
            for row in devices.head(HISTORY_ROWS).iter_rows(named=True)
        ]
        head = ["Device", "Runs affected", "Lost", "Verdicts", "Causes", "Slowest", "Last"]
        st.html(table(head, rows, numeric=frozenset({2, 3, 5})))
        if devices.height > HISTORY_ROWS:
            st.caption(f"The first {HISTORY_ROWS} of {devices.height}; `unskew sql --saved device_history` names all.")


def _problems() -> None:
    """What the collector found wrong, where nobody can overlook it."""
    found = data.problems()
    if found:
        with card("problems"):
            title("Problems of the log", "found by the collector; unskew store check has more")
            for problem in found[:HISTORY_ROWS]:
                st.html(f'<div class="u-note">{escape(problem)}</div>')


def _row(run: dict[str, Any], now_s: float) -> list[str]:
    """The cells of a run, from a row of the view `runs`."""
    # A diagnosis made afterwards writes to the log of a run that is over: that is no news of the run.
    age_s = now_s - (run["finished_us"] or run["last_us"]) / 1e6
    controlled = data.controlled(run["run"])
    state = status_of(run["status"] if run["finished_us"] is not None else None, controlled, age_s)
    going_on = data.state(run["run"], dropped=run["n_dropped"] > 0) if controlled else None
    asked = chip(f"{run['waits']} waits for you", "warn") if controlled else chip(f"{run['waits']} waited for you")
    asks = "" if run["waits"] is None else f" {asked}"
    target = json.loads(run["options"]).get("iterations")
    started = datetime.fromtimestamp(run["started_us"] / 1e6, tz=UTC).astimezone()
    return [
        f'<a href="?run={quote(run["run"])}"><b>{escape(run["run"])}</b></a>',
        chip(state, TONES[state]) + asks,
        _outcome(run, state, going_on),
        ago(age_s),
        f"{run['iterations']:,}" + (f' <span class="u-muted">of {target:,}</span>' if target else ""),
        str(run["ranks"] or "–"),
        f'<span title="{escape(run["device"])}">{escape(DEVICE_NAMES.get(run["device_kind"], run["device"]))}</span>',
        "–" if run["clock"] == "imported" else escape(run["mode"]),
        f"{started:%Y-%m-%d %H:%M}",
    ]


def _outcome(run: dict[str, Any], state: str, going_on: RunState | None) -> str:
    """Of a run that goes on what its page says: whether a controller holds it is not in the log. One that lost its controller
    did not end well, whatever was seen before."""
    found = Outcome(outcome=run["outcome"], smallest_slowdown=run["smallest_slowdown"], why=run["why"])
    if going_on is not None:
        found = outcome_of_run(going_on, controlled=True)
    elif state == "lost" and found.outcome == "well":
        found = Outcome(outcome="cannot_be_judged", smallest_slowdown=None, why=NO_END)
    word, slowdown, n = found.outcome, found.smallest_slowdown, run["n_verdicts"]
    text = f"well, down to {percent(slowdown)}" if word == "well" and slowdown is not None else OUTCOME_WORDS[word]
    verdicts = f' <span class="u-muted">{run["n_open"]} of {count(n, "verdict")} open</span>' if n else ""
    return f'<span title="{escape(found.why)}">{chip(text, OUTCOME_TONES[word])}</span>{verdicts}'
