"""Rank x iteration: how long each rank computed, against what its very micro-batches should have cost.

Of an imported run, which nobody predicted, each rank is compared with the median of all ranks in that iteration. Below the
cells, on the same axis, are the faults, verdicts and plan changes. A dead rank's cells are absent. A click on a cell opens
that iteration's timeline; the window and the measure are kept in the address.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import polars as pl
import streamlit as st

from unskew.dashboard import data as log
from unskew.dashboard.chart_parts import LEFT, MARK_COLOURS, RIGHT, mark_lines
from unskew.dashboard.data import Snapshot
from unskew.dashboard.marks import Mark, marks
from unskew.dashboard.run_status import imported
from unskew.dashboard.theme import DIVERGING, GRID_LINE, QUIET, SEQUENTIAL, card, empty, title
from unskew.dashboard.window import Window
from unskew.dashboard.wording import CHUNK_CLOCKS

RATIO, MILLISECONDS, WAIT = "Relative", "Milliseconds", "Wait share"
MARK_ROWS = ("fault", "verdict", "plan")
SYMBOLS = {"fault": "diamond", "verdict": "triangle", "plan": "circle"}
MARK_HEIGHT, GAP = 17, 8
CROWDED = 0.1
"""A label takes this part of the width."""
COLUMNS, CELLS = 400, 40_000
"""More iterations than fit are shown several to a column: the browser draws no more cells than these."""
LOWEST, HIGHEST, ROW = 192, 480, 24


class HeatmapCells(msgspec.Struct, frozen=True):
    """What the chart draws. `measure`: whose time a cell is ("compute", "iteration"; "" = nothing is known by rank);
    `rows`: the columns x, iteration, rank, measured_us, reference_us, iteration_us; `against`: what reference_us is;
    `ranks`: those with a row; `grain`: iterations to a column."""

    measure: str
    rows: pl.DataFrame
    against: str
    ranks: list[int]
    grain: int


def show(snapshot: Snapshot, window: Window, found: HeatmapCells) -> None:
    """Draw the card; `window` are the iterations shown."""
    heading = "Iteration time by rank" if found.measure == "iteration" else "Compute time by rank"
    with card("heatmap"):
        if found.rows.is_empty():
            title(heading)
            empty(_nothing(snapshot))
            return
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            title(heading, hint(snapshot, st.session_state.get("measure", RATIO)))
            measure = st.segmented_control(
                "Measure", [RATIO, MILLISECONDS, WAIT], default=RATIO, key="measure",
                bind="query-params", label_visibility="collapsed", required=True,
            )  # fmt: skip
        data = cells(found, window, str(measure))
        st.session_state["cells"] = data.select("iteration", "rank")
        st.echarts_chart(
            chart(snapshot, window, found, data, str(measure)),
            height=_body(found.ranks) + len(_mark_rows(snapshot)) * MARK_HEIGHT + 2 * GAP + 24,
            key="heatmap",
            on_select=_selected,
            alt=f"Heat map of measured time over its {found.against} by rank and iteration",
        )


def load(snapshot: Snapshot, window: Window) -> HeatmapCells:
    """The times of the window, as many iterations to a column as the browser needs. All ranks that the run ever had get a row,
    so that a dead one keeps an empty one; an imported run has its own numbers."""
    every = range(snapshot.state.ranks)
    grain = grain_of(len(window.iterations), len(every))
    if imported(snapshot.state):
        measure, rows = log.beside_peers(snapshot.run, window.first, window.last, grain)
        return HeatmapCells(measure, rows, "median of the ranks", rows["rank"].unique().sort().to_list(), grain)
    rows = log.judged(snapshot.run, window.first, window.last, grain)
    return HeatmapCells("compute", rows, "prediction", sorted({*every, *rows["rank"].to_list()}), grain)


def _mark_rows(snapshot: Snapshot) -> list[str]:
    return [] if imported(snapshot.state) else list(MARK_ROWS)


def hint(snapshot: Snapshot, measure: str) -> str:
    """What a cell is, in the words of the clock that took it."""
    if measure == WAIT:
        return "part of the iteration in which the rank does not compute"
    started = snapshot.state.started
    clock = CHUNK_CLOCKS.get(started.device_kind) if started is not None else None
    what = "measured ÷ predicted for its lengths"
    if imported(snapshot.state):
        what = "measured ÷ median of the ranks"
    if measure == MILLISECONDS:
        what = "per iteration"
    return f"{what}, {clock}" if clock else what


def _nothing(snapshot: Snapshot) -> str:
    if not snapshot.over:
        return "0 judged iterations: the first appear when the predictor is fitted."
    return "0 judged iterations in this window."


def cells(found: HeatmapCells, window: Window, measure: str) -> pl.DataFrame:
    """The cells of the window: positions x and y, value, and the tooltip of each."""
    lasts = pl.Series(window.iterations)[[min(at, len(window.iterations)) - 1 for at in _ends(window, found.grain)]]
    ratio = pl.col("measured_us") / pl.col("reference_us")
    wait = 100 * (1 - pl.col("measured_us") / pl.col("iteration_us")).clip(0)
    value = {RATIO: ratio, MILLISECONDS: pl.col("measured_us") / 1e3, WAIT: wait}[measure]
    one = pl.format("iteration {}", "iteration")
    several = pl.format("iterations {}–{}", "iteration", pl.lit(lasts).gather(pl.col("x")))
    return found.rows.select(
        "x",
        pl.col("rank").replace_strict(found.ranks, list(range(len(found.ranks))), return_dtype=pl.Int64).alias("y"),
        value.round(3).alias("value"),
        "iteration",
        "rank",
        (one if found.grain == 1 else several).alias("when"),
        _milliseconds("measured_us").alias("measured"),
        _milliseconds("reference_us").alias("reference"),
        ratio.round(2).cast(pl.String).alias("ratio"),
        pl.format("{} %", wait.round(0).cast(pl.Int64)).fill_null("–").alias("wait"),
    )


def _milliseconds(column: str) -> pl.Expr:
    return pl.format("{} ms", (pl.col(column) / 1e3).round(0).cast(pl.Int64))


def _ends(window: Window, grain: int) -> range:
    """Of each column, the position after its last."""
    return range(grain, len(window.iterations) + grain, grain)


def chart(snapshot: Snapshot, window: Window, found: HeatmapCells, data: pl.DataFrame, measure: str) -> dict[str, Any]:
    """The ECharts option: heat map above, marks below, one axis."""
    grain, rows = found.grain, _mark_rows(snapshot)
    names = [str(number) for number in window.iterations[::grain]]
    body = _body(found.ranks)
    shown = [mark for mark in marks(snapshot.state) if window.holds(mark.iteration)]
    axis = {"type": "category", "data": names, "axisTick": {"show": False}, "splitLine": {"show": False}}
    tooltip = f"<b>rank {{@rank}}, {{@when}}</b><br>{{@measured}} measured, {{@reference}} {found.against}: {{@ratio}}" + (
        "<br>not computing for {@wait} of the iteration" if found.measure == "compute" else ""
    )
    return {
        "animation": False,
        "dataset": {"source": data},
        "tooltip": {"trigger": "item", "confine": True},
        "grid": [
            {"left": LEFT, "right": RIGHT, "top": GAP, "height": body},
            {"left": LEFT, "right": RIGHT, "top": 2 * GAP + body, "height": len(rows) * MARK_HEIGHT},
        ],
        "xAxis": [
            {**axis, "gridIndex": 0, "axisLabel": {"show": False}, "axisLine": {"show": False}},
            {
                **axis,
                "gridIndex": 1,
                "axisLine": {"lineStyle": {"color": GRID_LINE}},
                "axisLabel": {"interval": max(1, window.label_step // grain) - 1, "margin": 8, "hideOverlap": True},
            },
        ],
        "yAxis": [_rows([f"rank {rank}" for rank in found.ranks], 0), _rows(rows, 1)],
        "visualMap": _scale(data, measure, body),
        "series": [
            {
                "type": "heatmap",
                "name": "cells",
                "encode": {"x": "x", "y": "y", "value": "value"},
                "selectedMode": "single",
                "select": {"itemStyle": {"borderWidth": 0}},
                "emphasis": {"itemStyle": {"borderColor": QUIET, "borderWidth": 1}},
                "tooltip": {"formatter": tooltip},
                "markLine": mark_lines(shown, window, chosen=st.session_state.get("iteration"), grain=grain),
            },
            *(_mark_series(kind, rows, [mark for mark in shown if mark.kind == kind], window, grain) for kind in rows),
        ],
    }


def grain_of(length: int, ranks: int) -> int:
    """How many iterations a column represents.

    >>> grain_of(400, 8), grain_of(401, 8), grain_of(20_000, 8), grain_of(400, 1_000)
    (1, 2, 50, 10)
    """
    return max(1, -(-length // max(1, min(COLUMNS, CELLS // max(1, ranks)))))


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


def _mark_series(kind: str, rows: list[str], shown: list[Mark], window: Window, grain: int) -> dict[str, Any]:
    at = [window.position(mark.iteration) for mark in shown]
    # A label that the next mark would cover goes to the other side.
    crowded = [after - before < CROWDED * len(window.iterations) for before, after in pairwise([*at, math.inf])]
    return {
        "type": "scatter", "name": kind, "xAxisIndex": 1, "yAxisIndex": 1, "symbol": SYMBOLS[kind], "symbolSize": 10,
        "itemStyle": {"color": MARK_COLOURS[kind], "opacity": 1}, "tooltip": {"formatter": "{b}"},
        "label": {"show": True, "position": "right", "formatter": "{@[2]}", "fontSize": 11, "color": QUIET},
        "labelLayout": {"hideOverlap": True},
        "data": [
            {
                "name": f"iteration {mark.iteration}: {mark.text}",
                "value": [position // grain, rows.index(kind), mark.short],
                "label": {"position": "left" if left else "right"},
            }
            for mark, position, left in zip(shown, at, crowded, strict=True)
        ],
    }  # fmt: skip


def _body(ranks: list[int]) -> int:
    """The height of the cells: few ranks get taller rows, so that the card is no flat strip."""
    return min(max(ROW * len(ranks), LOWEST), HIGHEST)


def _selected() -> None:
    """Open the clicked cell's iteration."""
    groups = st.session_state["heatmap"].selection.selected
    shown = st.session_state["cells"]
    for group in groups:
        if group["series_index"] == 0 and group["data_indices"] and group["data_indices"][0] < shown.height:
            st.session_state["iteration"] = int(shown["iteration"][group["data_indices"][0]])
