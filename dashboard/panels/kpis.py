"""The figures of the moment, each beside what it should be."""

from __future__ import annotations

from math import isnan
from typing import Literal

import polars as pl
import streamlit as st

from unskew.dashboard.data import IterationRow, Snapshot
from unskew.dashboard.run_status import imported
from unskew.dashboard.wording import count, duration, signed_percent

RECENT = 40
SLOWER_THAN_PREDICTED = 0.1


def show(snapshot: Snapshot) -> None:
    """One row of metrics; it wraps on a narrow screen."""
    latest, state = snapshot.latest, snapshot.state
    with st.container(horizontal=True, gap="small", key="kpis"):
        if latest is None:
            for label in ("Iterations", "Loss", "Tokens per second", "Iteration time", "Ranks"):
                _tile(label, "–", "not measured" if snapshot.over else "not measured yet")
            return
        target = state.started.options.get("iterations") if state.started else None
        if imported(state):
            _tile("Iterations", f"{snapshot.iterations.height:,}", f"in the log, the last is {latest.iteration}")
        else:
            done = f"of {target:,} done" if target else "done"
            if state.log_gap:
                done = f"of {target:,} in the log" if target else "in the log"
            shown = f"{latest.iteration + 1:,}"
            _tile("Iterations", shown, f"{done}, plan {latest.plan_version}", warn=bool(state.log_gap))
        # Of a training that is not ours most are not read: the log has NaN then.
        unread = state.started is not None and "command" in state.started.options and isnan(latest.loss or 0.0)
        _loss(None if unread else latest.loss, snapshot.iterations.tail(RECENT))
        _rate(latest)
        _iteration_time(latest.measured_us, latest.predicted_us)
        ranks, lost = state.ranks, len(state.lost)
        if imported(state):
            _tile("Ranks", f"{ranks}" if ranks else "–", "in the log" if ranks else "the log names none")
            return
        gone = state.finished is None and not snapshot.controlled
        note = "as last heard of" if gone else (f"{lost} lost" if lost else "all alive")
        _tile("Ranks", f"{ranks - lost} of {ranks}", note, warn=bool(lost) or gone)


def _tile(label: str, value: str, note: str, *, warn: bool = False, help_text: str | None = None) -> None:
    colour: Literal["orange", "gray"] = "orange" if warn else "gray"
    st.metric(label, value, note, delta_color=colour, delta_arrow="off", border=True, height="stretch", help=help_text)


def _loss(loss: float | None, recent: pl.DataFrame) -> None:
    if loss is None:
        _tile("Loss", "–", "not measured")
    else:
        _tile("Loss", f"{loss:.3f}", _loss_trend(recent.drop_nulls("loss")))


def _rate(latest: IterationRow) -> None:
    if not latest.tokens or not latest.measured_us:  # a loop of ours always has some
        _tile("Tokens per second", "–", "not measured")
    else:
        rate = latest.tokens * 1e6 / latest.measured_us
        _tile("Tokens per second", f"{rate:,.0f}", f"{count(latest.tokens, 'token')} in this iteration")


def _iteration_time(measured_us: int | None, predicted_us: int | None) -> None:
    if measured_us is None or not predicted_us:
        _tile("Iteration time", duration(measured_us), "no prediction")
        return
    off = measured_us / predicted_us - 1
    _tile(
        "Iteration time",
        duration(measured_us),
        f"{signed_percent(off)} against {duration(predicted_us)} predicted",
        warn=off > SLOWER_THAN_PREDICTED,
        help_text="The prediction knows the document lengths of this very iteration and the estimated speeds.",
    )


def _loss_trend(recent: pl.DataFrame) -> str:
    if recent.height < 2:
        return "nats per token"
    change = recent["loss"][-1] - recent["loss"][0]
    return f"{'−' if change < 0 else '+'}{abs(change):.3f} in {recent.height - 1} iterations"
