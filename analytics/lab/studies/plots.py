"""A study's plot: bars beside the paper's points, unless the study draws its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plotly.graph_objects import Figure

if TYPE_CHECKING:
    from unskew.analytics.lab.studies.frame import Study, StudyRow


def draw(study: Study, rows: Sequence[StudyRow]) -> Figure:
    """The study's plot."""
    figure = study.draw(rows) if study.draw is not None else _bars(study, rows)
    return figure.update_layout(title=f"{study.name}: {study.about}")


def _bars(study: Study, rows: Sequence[StudyRow]) -> Figure:
    """Ours with intervals as bars, the paper's as points."""
    shown = [row for row in rows if row.ours is not None]
    error = [row.high - row.ours if row.high is not None and row.ours is not None else 0.0 for row in shown]
    figure = Figure(layout={"yaxis_title": study.unit})
    names = [row.figure for row in shown]
    figure.add_bar(name="ours", x=names, y=[row.ours for row in shown], error_y={"type": "data", "array": error})
    if any(row.paper is not None for row in shown):
        figure.add_scatter(name="paper", x=names, y=[row.paper for row in shown], mode="markers", marker={"size": 10})
    return figure
