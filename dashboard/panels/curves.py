"""Two curves over iterations: the time each took against its prediction, and the loss."""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from unskew.analytics.core.run_state import RunState
from unskew.dashboard.chart_parts import LEFT, RIGHT, mark_lines
from unskew.dashboard.data import Snapshot
from unskew.dashboard.marks import marks
from unskew.dashboard.theme import ACCENT, GRID_LINE, QUIET, SLOW, card, empty, title
from unskew.dashboard.window import Window

HEIGHT = 230


def show_times(snapshot: Snapshot, window: Window) -> None:
    """Measured, predicted, and what it would be without the last changes."""
    with card("times"):
        data = times(snapshot, window)
        predicted = data["predicted"].count() > 0
        knows = "; the prediction knows each iteration's document lengths" if predicted else ""
        title("Iteration time", f"seconds{knows}")
        if data.is_empty():
            empty("0 committed iterations in this window.")
            return
        without = baselines(snapshot.state, window)
        st.echarts_chart(
            {
                **_frame(window, wide=True),
                "dataset": {"source": data},
                "legend": {"show": predicted, "top": 0, "left": 0, "itemWidth": 16, "itemHeight": 8, "icon": "roundRect"},
                "yAxis": {"type": "value", "scale": True, "splitNumber": 4, "splitLine": {"lineStyle": {"color": GRID_LINE}}},
                "series": [
                    *([_line("predicted", QUIET, width=1.5, dashed=True)] if predicted else []),
                    {**_line("measured", ACCENT), "markLine": _marks(snapshot.state, window)},
                    *without,
                ],
            },
            height=HEIGHT,
            key="times",
            alt="Line chart of measured and predicted iteration time",
        )


def show_loss(snapshot: Snapshot, window: Window) -> None:
    """The loss of the same window."""
    with card("loss"):
        title("Loss", "nats per token")
        data = window.placed(snapshot.iterations).select("x", "loss")
        if data.is_empty():
            empty("0 committed iterations in this window.")
            return
        if data["loss"].null_count() == data.height:
            empty("The loss was not measured.")
            return
        st.echarts_chart(
            {
                **_frame(window, wide=False),
                "dataset": {"source": data.with_columns(pl.col("loss").round(4))},
                "yAxis": {"type": "value", "scale": True, "splitNumber": 4, "splitLine": {"lineStyle": {"color": GRID_LINE}}},
                "series": [{**_line("loss", ACCENT), "markLine": _marks(snapshot.state, window, kinds=("plan",))}],
            },
            height=HEIGHT,
            key="loss",
            alt="Line chart of the loss",
        )


def times(snapshot: Snapshot, window: Window) -> pl.DataFrame:
    """x (position), measured and predicted in seconds."""
    seconds = [(pl.col(f"{name}_us") / 1e6).round(4).alias(name) for name in ("measured", "predicted")]
    return window.placed(snapshot.iterations).select("x", *seconds)


def baselines(state: RunState, window: Window) -> list[dict[str, Any]]:
    """For each applied change, the mean iteration time without it: as scored, or as proposed while not scored yet."""
    found = []
    for proposal in state.proposals.values():
        if proposal.applied is None:
            continue
        scored = proposal.scored
        value = scored.baseline_s if scored is not None else (proposal.proposed.baseline_us or 0) / 1e6
        first, last = proposal.applied.iteration, scored.to_iteration if scored is not None else window.last
        if not value or last < window.first or first > window.last:
            continue
        first, last = window.position(first), window.position(last)
        # One name for all, so that the legend names them once; the marks of plans distinguish them.
        found.append(
            {**_line("without the change", SLOW, dashed=True), "data": [[first, round(value, 4)], [last, round(value, 4)]]}
        )
        del found[-1]["encode"]
    return found


def _frame(window: Window, *, wide: bool) -> dict[str, Any]:
    """Tooltip, grid and the axis of iterations; a wide chart lies exactly below the heat map."""
    left, right, top = (LEFT, RIGHT, 30) if wide else (40, 12, 12)
    return {
        "animation": False,
        "tooltip": {"trigger": "axis", "confine": True},
        "grid": {"left": left, "right": right, "top": top, "bottom": 22, "outerBoundsMode": "none"},
        "xAxis": {
            "type": "category", "data": [str(iteration) for iteration in window.iterations], "axisTick": {"show": False},
            "axisLine": {"lineStyle": {"color": GRID_LINE}},
            "axisLabel": {"interval": window.label_step * (1 if wide else 2) - 1, "hideOverlap": True},
        },
    }  # fmt: skip


def _line(name: str, colour: str, *, width: float = 2, dashed: bool = False) -> dict[str, Any]:
    return {
        "type": "line", "name": name, "encode": {"x": "x", "y": name}, "showSymbol": False, "color": colour,
        "lineStyle": {"width": width, "type": "dashed" if dashed else "solid"}, "emphasis": {"disabled": True},
    }  # fmt: skip


def _marks(state: RunState, window: Window, kinds: tuple[str, ...] = ("fault", "verdict", "plan")) -> dict[str, Any]:
    shown = [mark for mark in marks(state) if mark.kind in kinds and window.holds(mark.iteration)]
    return mark_lines(shown, window)
