"""ResiHP's published figures (data/resihp.toml)."""

from __future__ import annotations

import msgspec

from unskew.data import table

Figures = tuple[float, float, float]


class PaperFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table's columns; what its keys and numbers mean stands there."""

    source: str
    models: dict[str, str]
    interval_hours: dict[str, float]
    session_hours: dict[int, float]
    fault_free: dict[str, float]
    drops: dict[str, float]
    figure_2: dict[str, float]
    figure_2_resihp: dict[str, float]
    table_6: dict[str, dict[str, dict[str, float]]]
    figure_9: dict[str, dict[str, Figures]]
    figure_10: dict[str, dict[str, Figures]]
    figure_11: dict[str, dict[str, Figures]]


PAPER = table("resihp", PaperFigures)
