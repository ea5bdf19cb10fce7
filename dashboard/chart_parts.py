"""What the charts over iterations share: margins, and the lines at which something changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unskew.dashboard.marks import Mark
from unskew.dashboard.theme import ACCENT, DEAD, QUIET, SLOW
from unskew.dashboard.window import Window

LEFT, RIGHT = 58, 66
"""Margins of wide charts, so that their axes are exactly one above the other."""

MARK_COLOURS = {"fault": DEAD, "verdict": SLOW, "plan": ACCENT}


def mark_lines(marks: Iterable[Mark], window: Window, *, chosen: int | None = None, grain: int = 1) -> dict[str, Any]:
    """Thin vertical lines (ECharts `markLine`). `chosen`: the iteration drilled into; `grain`: iterations per position."""
    lines = [_line(window.position(mark.iteration) // grain, MARK_COLOURS[mark.kind], "dashed") for mark in marks]
    if chosen is not None and window.holds(chosen):
        lines.append(_line(window.position(chosen) // grain, QUIET, "solid"))
    return {"silent": True, "symbol": "none", "animation": False, "label": {"show": False}, "data": lines}


def _line(position: int, colour: str, look: str) -> dict[str, Any]:
    return {"xAxis": position, "lineStyle": {"color": colour, "width": 1, "type": look, "opacity": 0.85}}
