"""Rank x iteration: how long each rank computed, against what its very micro-batches should have cost.

Below the cells, on the same axis, stand the faults, verdicts and plan changes. A dead rank's cells are absent. A click on a
cell opens that iteration's timeline; the window and the measure are kept in the address.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from unskew.dashboard import data as log
from unskew.dashboard.chart_parts import LEFT, MARK_COLOURS, RIGHT, label_step, mark_lines
from unskew.dashboard.data import Snapshot
from unskew.dashboard.marks import Mark, marks
from unskew.dashboard.run_state import imported
from unskew.dashboard.theme import DIVERGING, GRID_LINE, QUIET, SEQUENTIAL, card, empty, title

TOOLTIP = (
    "<b>rank {@rank}, {@when}</b><br>{@measured} measured, {@predicted} predicted: {@ratio}<br>"
    "not computing for {@wait} of the iteration"
)
RATIO, MILLISECONDS, WAIT = "Measured ÷ predicted", "Milliseconds", "Wait share"
HINTS = {
    RATIO: "1.00 = as predicted for the lengths it was given",
    MILLISECONDS: "time in chunks per iteration",
    WAIT: "part of the iteration in which the rank does not compute",
}
MARK_ROWS = ("fault", "verdict", "plan")
SYMBOLS = {"fault": "diamond", "verdict": "triangle", "plan": "circle"}
MARK_HEIGHT, GAP = 17, 8
COLUMNS = 400
"""More iterations than this are shown several to a column."""


def show(snapshot: Snapshot, window: range) -> None:
    """Draw the card; `window` are the iterations shown."""
    with card("heatmap"):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            title("Compute time by rank", HINTS[st.session_state.get("measure", RATIO)])
            measure = st.segmented_control(
                "Measure", [RATIO, MILLISECONDS, WAIT], default=RATIO, key="measure",
                bind="query-params", label_visibility="collapsed", required=True,
            )  # fmt: skip
        data = cells(snapshot, window, str(measure))
        if data.is_empty():
            nothing = (
                ": the first appear when the predictor is fitted" if snapshot.story.finished is None else " in this window"
            )
            empty("An imported run is not judged." if imported(snapshot.story) else f"0 judged iterations{nothing}.")
            return
        st.session_state["cells"] = data.select("iteration", "rank")
        st.echarts_chart(
            chart(snapshot, window, data, str(measure)),
            height=_height(snapshot),
            key="heatmap",
            on_select=_selected,
            alt="Heat map of measured over predicted compute time by rank and iteration",
        )


def cells(snapshot: Snapshot, window: range, measure: str) -> pl.DataFrame:
    """The cells of the window: positions x and y, value, and what the tooltip says of each."""
    grain = grain_of(window)
    data = log.judged(snapshot.run, window.start, window.stop, grain)
    last = (pl.col("iteration") + grain - 1).clip(upper_bound=window.stop - 1)
    ratio = pl.col("measured_us") / pl.col("predicted_us")
    wait = 100 * (1 - pl.col("measured_us") / pl.col("iteration_us")).clip(0)
    value = {RATIO: ratio, MILLISECONDS: pl.col("measured_us") / 1e3, WAIT: wait}[measure]
    return data.select(
        ((pl.col("iteration") - window.start) // grain).alias("x"),
        pl.col("rank").alias("y"),
        value.round(3).alias("value"),
        "iteration",
        "rank",
        (pl.format("iteration {}", "iteration") if grain == 1 else pl.format("iterations {}–{}", "iteration", last)).alias(
            "when"
        ),
        pl.format("{} ms", (pl.col("measured_us") / 1e3).round(0).cast(pl.Int64)).alias("measured"),
        pl.format("{} ms", (pl.col("predicted_us") / 1e3).round(0).cast(pl.Int64)).alias("predicted"),
        ratio.round(2).cast(pl.String).alias("ratio"),
        pl.format("{} %", wait.round(0).cast(pl.Int64)).alias("wait"),
    )


def chart(snapshot: Snapshot, window: range, data: pl.DataFrame, measure: str) -> dict[str, Any]:
    """The ECharts option: heat map above, marks below, one axis."""
    grain = grain_of(window)
    iterations = [str(number) for number in window[::grain]]
    ranks = _ranks(snapshot)
    body = _height(snapshot) - len(MARK_ROWS) * MARK_HEIGHT - 2 * GAP - 24
    shown = [mark for mark in marks(snapshot.story) if mark.iteration in window]
    chosen = st.session_state.get("iteration")
    axis = {"type": "category", "data": iterations, "axisTick": {"show": False}, "splitLine": {"show": False}}
    return {
        "animation": False,
        "dataset": {"source": data},
        "tooltip": {"trigger": "item", "confine": True},
        "grid": [
            {"left": LEFT, "right": RIGHT, "top": GAP, "height": body},
            {"left": LEFT, "right": RIGHT, "top": 2 * GAP + body, "height": len(MARK_ROWS) * MARK_HEIGHT},
        ],
        "xAxis": [
            {**axis, "gridIndex": 0, "axisLabel": {"show": False}, "axisLine": {"show": False}},
            {
                **axis,
                "gridIndex": 1,
                "axisLine": {"lineStyle": {"color": GRID_LINE}},
                "axisLabel": {"interval": max(1, label_step(window) // grain) - 1, "margin": 8},
            },
        ],
        "yAxis": [_rows([f"rank {rank}" for rank in ranks], 0), _rows(list(MARK_ROWS), 1)],
        "visualMap": _scale(data, measure, body),
        "series": [
            {
                "type": "heatmap",
                "name": "cells",
                "encode": {"x": "x", "y": "y", "value": "value"},
                "selectedMode": "single",
                "select": {"itemStyle": {"borderWidth": 0}},
                "emphasis": {"itemStyle": {"borderColor": QUIET, "borderWidth": 1}},
                "tooltip": {"formatter": TOOLTIP},
                "markLine": mark_lines(shown, first=window.start, chosen=chosen if chosen in window else None, grain=grain),
            },
            *(_mark_series(kind, [mark for mark in shown if mark.kind == kind], window) for kind in MARK_ROWS),
        ],
    }


def grain_of(window: range) -> int:
    """How many iterations a column stands for.

    >>> grain_of(range(400)), grain_of(range(401)), grain_of(range(20_000))
    (1, 2, 50)
    """
    return max(1, -(-len(window) // COLUMNS))


def _rows(names: list[str], grid: int) -> dict[str, Any]:
    return {
        "type": "category", "gridIndex": grid, "data": names, "inverse": True, "axisTick": {"show": False},
        "axisLine": {"show": False}, "splitLine": {"show": False}, "axisLabel": {"interval": 0 if len(names) <= 32 else "auto"},
    }  # fmt: skip


def _scale(data: pl.DataFrame, measure: str, height: int) -> dict[str, Any]:
    """Ratios diverge from 1.00 and are cut at 0.4 and 1.6; the other measures start at 0."""
    low, high, colours, ends = 0.4, 1.6, DIVERGING, ["≥ 1.6", "≤ 0.4"]
    if measure == WAIT:
        low, high, colours, ends = 0, 100, SEQUENTIAL, ["100 %", "0 %"]
    elif measure == MILLISECONDS:
        top = data["value"].max()
        high = float(str(top)) if top is not None else 1.0
        low, colours, ends = 0, SEQUENTIAL, [f"{high:.0f} ms", "0 ms"]
    return {
        "type": "continuous", "seriesIndex": 0, "dimension": 2, "min": low, "max": high, "inRange": {"color": colours},
        "text": ends, "right": 6, "top": GAP + 2, "itemWidth": 10, "itemHeight": max(60, height - 60), "calculable": False,
        "hoverLink": False,
    }  # fmt: skip


def _mark_series(kind: str, shown: list[Mark], window: range) -> dict[str, Any]:
    return {
        "type": "scatter", "name": kind, "xAxisIndex": 1, "yAxisIndex": 1, "symbol": SYMBOLS[kind], "symbolSize": 10,
        "itemStyle": {"color": MARK_COLOURS[kind], "opacity": 1}, "tooltip": {"formatter": "{b}"},
        "label": {"show": True, "position": "right", "formatter": "{@[2]}", "fontSize": 11, "color": QUIET},
        "labelLayout": {"hideOverlap": True},
        "data": [
            {
                "name": f"iteration {mark.iteration}: {mark.text}",
                "value": [(mark.iteration - window.start) // grain_of(window), MARK_ROWS.index(kind), mark.short],
            }
            for mark in shown
        ],
    }  # fmt: skip


def _ranks(snapshot: Snapshot) -> list[int]:
    """All ranks the run ever had, so that a dead one keeps its empty row."""
    count = snapshot.story.started.ranks if snapshot.story.started else 0
    seen = snapshot.judged["rank"].max()
    return list(range(max(count, int(str(seen)) + 1 if seen is not None else 0)))


def _height(snapshot: Snapshot) -> int:
    rows = len(_ranks(snapshot))
    return min(24 * rows, 480) + len(MARK_ROWS) * MARK_HEIGHT + 2 * GAP + 24


def _selected() -> None:
    """Open the clicked cell's iteration."""
    groups = st.session_state["heatmap"].selection.selected
    shown = st.session_state["cells"]
    for group in groups:
        if group["series_index"] == 0 and group["data_indices"] and group["data_indices"][0] < shown.height:
            st.session_state["iteration"] = int(shown["iteration"][group["data_indices"][0]])
