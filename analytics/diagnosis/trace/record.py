"""A trace under one plan -> its recording: what waited for what, and when it ran."""

from __future__ import annotations

from unskew.analytics.diagnosis.trace import streams, turns
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.analytics.diagnosis.trace.replay import TraceRecording


def record(trace: Trace) -> TraceRecording:
    """By the rule that the trace names. Raises `GraphError` where it does not show what waits for what."""
    return streams.record(trace) if trace.streams else turns.record(trace)
