"""The newest events of the log, filtered by type, with the payload of a chosen one."""

from __future__ import annotations

import msgspec
import polars as pl
import streamlit as st

from unskew.collector.events import CONTROL, TELEMETRY, tag_of
from unskew.dashboard import data
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels.records import clock
from unskew.dashboard.theme import empty

CONTROL_TYPES = [tag_of(kind) for kind in CONTROL]
ALL_TYPES = CONTROL_TYPES + [tag_of(kind) for kind in TELEMETRY]
ENVELOPE = frozenset({"seq", "at_us", "stream", "version", "actor", "type"})
ROW_PX = 33


def show(snapshot: Snapshot) -> None:
    """The tail is held while a payload is open, so that the chosen row stays the chosen row."""
    with st.container(horizontal=True, vertical_alignment="center"):
        types = st.multiselect(
            "Types", ALL_TYPES, default=[], placeholder="All decisions and faults; choose types to narrow, or for telemetry",
            key="types", bind="query-params", label_visibility="collapsed",
        )  # fmt: skip
        rows = st.segmented_control(
            "Rows", ["12", "50", "200"], default="12", key="rows", bind="query-params", label_visibility="collapsed",
            required=True, width="content",
        )  # fmt: skip
    chosen = _chosen()
    held: pl.DataFrame | None = st.session_state.get("held_tail") if chosen is not None else None
    events = held if held is not None else data.tail(snapshot.run, tuple(types or CONTROL_TYPES), int(str(rows)))
    st.session_state["held_tail"] = events
    if events.is_empty():
        empty("0 events matched.")
        return
    st.dataframe(
        listing(events),
        hide_index=True,
        height=ROW_PX * (events.height + 1) + 3,
        on_select="rerun",
        selection_mode="single-row",
        key="tail",
        column_config={
            "Event": st.column_config.TextColumn(width="large"),
            "Number": st.column_config.NumberColumn(width="small"),
        },
    )
    if chosen is None or chosen >= events.height:
        st.caption(f"The newest {events.height} that matched. Select a row to read it whole.")
    else:
        st.caption("The tail is held while a row is selected.")
        st.json(msgspec.json.decode(events["payload"][chosen]))


def listing(events: pl.DataFrame) -> pl.DataFrame:
    """The table as shown: the envelope's fields in columns, the event's own fields as text."""
    return events.select(
        pl.col("at_us").map_elements(clock, return_dtype=pl.String).alias("When"),
        pl.col("type").alias("Type"),
        pl.col("writer").alias("Writer"),
        pl.col("seq").alias("Number"),
        pl.col("payload").map_elements(own_fields, return_dtype=pl.String).alias("Event"),
    )


def own_fields(payload: str) -> str:
    """A line of the log without its envelope.

    >>> own_fields('{"seq":1,"at_us":2,"type":"note@1","text":"hello","by":"mira"}')
    'text hello, by mira'
    """
    fields: dict[str, object] = msgspec.json.decode(payload)
    return ", ".join(f"{name} {_short(value)}" for name, value in fields.items() if name not in ENVELOPE)


def _short(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _chosen() -> int | None:
    """The selected row."""
    state = st.session_state.get("tail")
    rows = state.selection.rows if state is not None else []
    return rows[0] if rows else None
