"""How far skew reaches: what slow devices lose, and what all that wait for them lose, level by level up to the whole job."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from unskew.analytics.diagnosis.skew import LEAST_LOSS, Level, Skew, skew_of
from unskew.dashboard import data
from unskew.dashboard.data import Snapshot
from unskew.dashboard.theme import ACCENT, GRID_LINE, QUIET, SLOW, card, empty, escape, title
from unskew.dashboard.window import Window
from unskew.dashboard.wording import duration, parties

LOSERS: dict[Level, str] = {
    "device": "slow devices themselves",
    "tp": "others of the tensor-parallel group",
    "pp": "other stages of the replica",
    "dp": "other replicas",
}
APART: dict[Level, str] = {
    "device": "slowest {:.2f}× its healthy time",
    "tp": "slowest member {:.2f}× the fastest",
    "pp": "slowest stage {:.2f}× the fastest",
    "dp": "slowest replica {:.2f}× the fastest",
}
NOT_KNOWN = "No chunk times of ranks with known places in this window: what slow devices cost those that wait is not known."
ROW = 44


def show(snapshot: Snapshot, window: Window) -> None:
    """The card; a sentence where nobody knows chunk times or places, or there is one device."""
    found = skew_of(data.skew(snapshot.run, window.first, window.last))
    with card("skew"):
        if found is None or len(found.levels) == 1:
            title("Skew")
            empty(NOT_KNOWN if found is None else "One device: nobody waits for it.")
            return
        against = "the prediction" if found.predicted else "the fastest device"
        title("Skew", f"device-time lost in a mean iteration of the window, against {against}")
        if found.amplification is None:
            slow = [one.verdict for one in snapshot.state.open_verdicts if one.verdict.cause == "slow_device"]
            known = f" It was fitted while {parties(slow[0].culprits)} was slow already." if found.predicted and slow else ""
            lost = f"slow devices lose less than {100 * LEAST_LOSS:.0f} % of the chunk time, too little to follow further."
            empty(f"Against {against} {lost}{known}")
            return
        st.html(f'<div class="u-text"><p>{escape(sentence(found))}</p></div>')
        st.plotly_chart(figure(found), key="skew", config={"displayModeBar": False})


def sentence(found: Skew) -> str:
    """What the chart shows, of a skew with an amplification."""
    times = found.amplification or 0.0
    own_us, share = found.levels[0].lost_us, 100 * found.slowest_share
    less = " The plan makes up for the rest." if times < 1 else ""
    return (
        f"Slow devices lose {duration(own_us)} per iteration, the job {duration(found.lost_us)} of device-time: "
        f"{times:.1f} times as much.{less} Rank {found.slowest} took longest in {share:.0f} % of the iterations."
    )


def figure(found: Skew) -> go.Figure:
    """A waterfall from the slow devices down to the whole job; in blue, what the plan in force saves."""
    names = [f"{LOSERS[one.level]}<br>{_muted(APART[one.level].format(one.ratio))}" for one in found.levels]
    times = [one.amplification or 0.0 for one in found.levels]
    values = [*(one.lost_us / 1e3 for one in found.levels), found.lost_us / 1e3]
    chart = go.Figure(
        go.Waterfall(
            orientation="h", y=[*names, "<b>whole job</b>"], x=values, measure=["relative"] * len(names) + ["total"],
            text=[f"{one:.2f}×" for one in [*times, sum(times)]], textposition="outside", cliponaxis=False, width=0.62,
            increasing={"marker": {"color": SLOW}}, decreasing={"marker": {"color": ACCENT}},
            totals={"marker": {"color": QUIET}}, connector={"line": {"color": QUIET, "width": 1, "dash": "dot"}},
            hovertemplate="%{text}, %{delta:.1f} ms<extra></extra>",
        )
    )  # fmt: skip
    chart.update_yaxes(autorange="reversed", ticklabelstandoff=8)
    chart.update_xaxes(gridcolor=GRID_LINE, zeroline=False, title="ms of device-time; × over what slow devices lose themselves")
    chart.update_layout(
        height=70 + ROW * len(values), margin={"l": 10, "r": 50, "t": 6, "b": 10}, showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    return chart


def _muted(text: str) -> str:
    return f"<span style='color:{QUIET}'>{text}</span>"
