"""The figures of the moment, each beside what it should be."""

from __future__ import annotations

import polars as pl
import streamlit as st

from unskew.dashboard.data import Snapshot
from unskew.dashboard.wording import duration, signed_percent

RECENT = 40


def show(snapshot: Snapshot) -> None:
    """One row of metrics; it wraps on a narrow screen."""
    recent = snapshot.iterations.tail(RECENT)
    latest = snapshot.latest
    story = snapshot.story
    options = story.started.options if story.started else {}
    target = options.get("iterations")
    ranks = story.started.ranks if story.started else 0
    with st.container(horizontal=True, gap="small", key="kpis"):
        if latest is None:
            for label in ("Iteration", "Loss", "Tokens per second", "Iteration time", "Ranks"):
                st.metric(label, "–", border=True, width=200)
            return
        _tile(
            "Iteration", f"{latest.iteration + 1}", f"of {target} · plan {latest.epoch}" if target else f"plan {latest.epoch}"
        )
        _tile("Loss", f"{latest.loss:.3f}", _loss_trend(recent), recent["loss"].to_list())
        rate = (recent["tokens"] * 1e6 / recent["measured_us"]).to_list()
        _tile(
            "Tokens per second",
            f"{latest.tokens * 1e6 / latest.measured_us:,.0f}",
            f"{latest.tokens:,} in this iteration",
            rate,
        )
        _iteration_time(latest.measured_us, latest.predicted_us)
        lost = len({loss.rank for loss in story.lost})
        _tile("Ranks", f"{ranks - lost} of {ranks}", f"{lost} lost" if lost else "all alive", good=not lost)


def _tile(label: str, value: str, note: str, chart: list[float] | None = None, good: bool | None = None) -> None:
    st.metric(
        label,
        value,
        note,
        delta_color="off" if good is None else ("normal" if good else "orange"),
        delta_arrow="off",
        border=True,
        width="stretch",
        height="stretch",
        chart_data=chart,
    )


def _iteration_time(measured_us: int, predicted_us: int | None) -> None:
    if predicted_us is None:
        _tile("Iteration time", duration(measured_us), "no prediction yet")
        return
    off = measured_us / predicted_us - 1
    st.metric(
        "Iteration time",
        duration(measured_us),
        f"{signed_percent(off)} against {duration(predicted_us)} predicted",
        delta_color="orange" if off > 0.1 else "off",
        delta_arrow="off",
        border=True,
        height="stretch",
        help="The prediction knows the document lengths of this very iteration and the speeds the detector believes in.",
    )


def _loss_trend(recent: pl.DataFrame) -> str:
    if recent.height < 2:
        return "nats per token"
    change = recent["loss"][-1] - recent["loss"][0]
    return f"{'−' if change < 0 else '+'}{abs(change):.3f} in {recent.height - 1} iterations"
