"""The newest events of the log, filtered by type, with the payload of a chosen one."""

from __future__ import annotations

import msgspec
import polars as pl
import streamlit as st

from unskew.collector.events import CONTROL, TELEMETRY, tag_of
from unskew.dashboard import data
from unskew.dashboard.data import Snapshot
from unskew.dashboard.records import clock
from unskew.dashboard.theme import empty

CONTROL_TYPES = [tag_of(kind) for kind in CONTROL]
ALL_TYPES = CONTROL_TYPES + [tag_of(kind) for kind in TELEMETRY]


def show(snapshot: Snapshot) -> None:
    """The tail is held while a payload is open, so that the chosen row stays the chosen row."""
    types = st.multiselect(
        "Types", ALL_TYPES, default=[], placeholder="All decisions and faults (choose types to narrow, or to see telemetry)",
        key="types", bind="query-params", label_visibility="collapsed",
    )  # fmt: skip
    held: pl.DataFrame | None = st.session_state.get("held_tail") if _chosen() is not None else None
    events = held if held is not None else data.tail(snapshot.run, tuple(types or CONTROL_TYPES))
    if events.is_empty():
        empty("0 events matched.")
        return
    st.session_state["held_tail"] = events
    st.dataframe(
        events.select(
            pl.col("at_us").map_elements(clock, return_dtype=pl.String).alias("When"),
            pl.col("type").alias("Type"),
            pl.col("writer").alias("Writer"),
            pl.col("seq").alias("Seq"),
            pl.col("payload").alias("Payload"),
        ),
        hide_index=True,
        height=min(36 * (events.height + 1), 360),
        on_select="rerun",
        selection_mode="single-row",
        key="tail",
        column_config={"Payload": st.column_config.TextColumn(width="large")},
    )
    chosen = _chosen()
    if chosen is None or chosen >= events.height:
        st.caption(f"The newest {events.height} that matched. Select a row to read its payload.")
    else:
        st.caption("The tail is held while a row is selected.")
        st.json(msgspec.json.decode(events["payload"][chosen].encode()))


def _chosen() -> int | None:
    """The selected row."""
    state = st.session_state.get("tail")
    rows = state.selection.rows if state is not None else []
    return rows[0] if rows else None
