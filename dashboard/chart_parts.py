"""What the charts over iterations share: margins, and the lines at which something changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unskew.dashboard.marks import Mark
from unskew.dashboard.theme import ACCENT, DEAD, QUIET, SLOW

LEFT, RIGHT = 58, 66
"""Margins of wide charts, so that their axes stand exactly one above the other."""

MARK_COLOURS = {"fault": DEAD, "verdict": SLOW, "plan": ACCENT}


def mark_lines(marks: Iterable[Mark], *, first: int, chosen: int | None = None, grain: int = 1) -> dict[str, Any]:
    """Thin vertical lines (ECharts `markLine`). `first`: iteration at the axis' position 0; `chosen`: the one drilled into;
    `grain`: iterations per position."""
    lines = [_line((mark.iteration - first) // grain, MARK_COLOURS[mark.kind], "dashed") for mark in marks]
    if chosen is not None:
        lines.append(_line((chosen - first) // grain, QUIET, "solid"))
    return {"silent": True, "symbol": "none", "animation": False, "label": {"show": False}, "data": lines}


def label_step(window: range) -> int:
    """Every how many iterations the axis names one: a round number, at most some 16 names."""
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(window) / step <= 16), 1000)


def _line(position: int, colour: str, look: str) -> dict[str, Any]:
    return {"xAxis": position, "lineStyle": {"color": colour, "width": 1, "type": look, "opacity": 0.85}}
