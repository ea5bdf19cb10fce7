"""Drill-down: when each chunk of one committed iteration ran, measured above, predicted below."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import plotly.graph_objects as go
import polars as pl
import streamlit as st
from plotly.subplots import make_subplots

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.run_state import RunState
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.collector.events import CHUNK_NAMES
from unskew.dashboard import data
from unskew.dashboard.data import Snapshot
from unskew.dashboard.theme import ACCENT, GRID_LINE, QUIET, card, empty, title
from unskew.dashboard.wording import CHUNK_CLOCKS

COLOURS = {"F": ACCENT, "B": "#3aa58f", "W": "#c9a227"}
COLUMNS = {"rank": pl.Int64, "kind": pl.String, "micro_batch": pl.Int64, "start_ms": pl.Float64, "ms": pl.Float64}


def show(snapshot: Snapshot) -> None:
    """The card; the iteration comes from a click in the heat map or is typed, and the address keeps it."""
    with card("timeline"):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            title("Timeline of one iteration", "by wall clock; click a cell of the heat map, or name an iteration")
            last = snapshot.latest.iteration if snapshot.latest is not None else 0
            chosen = st.number_input(
                "Iteration", value=None, min_value=0, max_value=max(last, 0), step=1, placeholder="iteration", key="iteration",
                bind="query-params", label_visibility="collapsed", width=140,
            )  # fmt: skip
        if chosen is None:
            return
        measured = data.chunks(snapshot.run, int(chosen))
        if measured.is_empty():
            empty(f"0 chunks matched iteration {chosen}: it is not in the log, or its spans were not kept.")
            return
        predicted = prediction(snapshot.state, snapshot.run, int(chosen))
        st.plotly_chart(figure(measured, predicted), key="timeline", config={"displayModeBar": False})
        started = snapshot.state.started
        if started is not None and (clock := CHUNK_CLOCKS.get(started.device_kind)):
            st.caption(f"A bar is as long as the chunk took by wall clock; the heat map counts it {clock}.")


def prediction(state: RunState, run: str, iteration: int) -> pl.DataFrame | None:
    """The chunks as predicted for these lengths by the plan, the fit and the speeds of that time; None without a fit."""
    plans = [applied for applied in state.plans if applied.event.iteration <= iteration]
    fits = [fitted for fitted in state.predictors if fitted.watermark < iteration]
    works = data.works(run, iteration)
    if not plans or not fits or len(works) != len(plans[-1].plan.routes):
        return None
    cost = msgspec.convert(fits[-1].model, CostModel)
    timeline = predict_iteration(plans[-1].plan, works, cost, estimated_speeds(state, iteration)).timeline
    rows = [
        (action.rank, action.kind, action.micro_batch, float(start) / 1e3, float(end - start) / 1e3)
        for action, start, end in zip(timeline.schedule.order, timeline.start_us, timeline.end_us, strict=True)
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def estimated_speeds(state: RunState, iteration: int) -> dict[int, dict[str, float]]:
    """The speeds that the verdicts of that time name."""
    speeds: dict[int, dict[str, float]] = {}
    for judged in state.verdicts.values():
        if judged.closed is not None and judged.closed.at_iteration < iteration:
            continue
        for verdict in (revision.verdict for revision in judged.revisions if revision.verdict.at_iteration < iteration):
            if verdict.speed:
                speeds |= {party.rank: dict(verdict.speed) for party in verdict.culprits if party.rank is not None}
    return speeds


def figure(measured: pl.DataFrame, predicted: pl.DataFrame | None) -> go.Figure:
    """Two Gantt charts over one time axis; `measured` and `predicted` have the columns of `COLUMNS`."""
    parts = [("measured", measured)] + ([("predicted", predicted)] if predicted is not None else [])
    ranks = sorted({rank for _, part in parts for rank in part["rank"].to_list()})
    chart = make_subplots(
        rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=[name for name, _ in parts]
    )
    for row, (name, part) in enumerate(parts, start=1):
        for kind in _kinds(part):
            some = part.filter(pl.col("kind") == kind)
            chart.add_bar(
                row=row, col=1, orientation="h", name=CHUNK_NAMES[kind], legendgroup=kind, showlegend=row == 1,
                base=some["start_ms"], x=some["ms"], y=[f"rank {rank}" for rank in some["rank"]],
                marker={"color": COLOURS[kind], "line": {"width": 1, "color": "rgba(255,255,255,0.55)"}}, width=0.8,
                customdata=some["micro_batch"],
                hovertemplate=f"{CHUNK_NAMES[kind]} of micro-batch %{{customdata}}, %{{y}}<br>"
                f"%{{x:.0f}} ms, {name}<extra></extra>",
            )  # fmt: skip
        end = float(str((part["start_ms"] + part["ms"]).max()))
        chart.add_vline(x=end, row=row, col=1, line={"color": QUIET, "width": 1, "dash": "dot"})
    chart.update_yaxes(categoryorder="array", categoryarray=[f"rank {rank}" for rank in reversed(ranks)], ticklabelstandoff=6)
    chart.update_xaxes(gridcolor=GRID_LINE, zeroline=False)
    chart.update_xaxes(title="ms since the iteration's start", row=len(parts), col=1)
    chart.update_layout(
        height=90 + len(parts) * (40 + 22 * len(ranks)), barmode="overlay", margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    chart.update_annotations(x=0, xanchor="left", font={"size": 13})
    return chart


def _kinds(part: pl.DataFrame) -> Iterable[str]:
    return [kind for kind in COLOURS if kind in set(part["kind"].to_list())]
