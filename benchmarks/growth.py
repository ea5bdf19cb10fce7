"""How the time of a plan grows with the devices, drawn from the figures of scheduler/planners.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from unskew.benchmarks.report import Figure

_TIME = re.compile(r"a full plan for ([\d,]+) devices")


def draw_growth(figures: Sequence[Figure], json_path: Path) -> Path | None:
    """Write the chart as a page beside the report (`NAME.growth.html`, readable without a network) and return its path; None
    where no figure is such a time."""
    timed = [(int(found[1].replace(",", "")), one) for one in figures if (found := _TIME.fullmatch(one.name))]
    if not timed:
        return None
    from plotly.graph_objects import Figure as Chart  # noqa: PLC0415 - half a second that other benches save

    devices, spent_s, allowed_s = zip(*((n, one.value, one.bar) for n, one in timed), strict=True)
    axes = {"xaxis": {"type": "log", "title": "devices"}, "yaxis": {"type": "log", "title": "CPU seconds of one core"}}
    chart = Chart(layout={"title": "A full plan: time over the number of devices", **axes})
    chart.add_scatter(name="measured", x=devices, y=spent_s, mode="lines+markers")
    chart.add_scatter(name="allowed", x=devices, y=allowed_s, mode="markers", marker={"symbol": "line-ew-open", "size": 16})
    path = json_path.with_suffix(".growth.html")
    chart.write_html(path, include_plotlyjs=True)
    return path
