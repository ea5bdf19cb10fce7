"""How the page looks: the stylesheet, the few colours that charts need, and the parts that every card is made of.

Colours of text and surfaces follow the browser's light or dark setting through the stylesheet. Charts get colours that read on
both, so that nothing has to know the setting. Slow is orange and fast is blue (never red against green), and every colour is
accompanied by a word or a number.
"""

from __future__ import annotations

import html
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import streamlit as st

Tone = Literal["ok", "warn", "bad", "info", "quiet"]

HERE = Path(__file__).parent
ICON = HERE / "icon.svg"
STYLE = HERE / "style.css"

ACCENT = "#5b86f0"
QUIET = "#8b97a8"
SLOW = "#e0762b"
DEAD = "#c2474f"
NEUTRAL = "rgba(139,151,168,0.20)"
DIVERGING = ["#2f78c4", "#7fb0e0", NEUTRAL, "#f2a65e", "#d1560f"]
SEQUENTIAL = [NEUTRAL, "#8fb0f5", "#3a63d8"]
GRID_LINE = "rgba(139,151,168,0.22)"


def apply() -> None:
    """Load the stylesheet; call once per page."""
    st.html(STYLE)


def brand() -> None:
    """The name of the thing."""
    st.html('<div class="u-brand">Unskew</div>', width="content")


def card(name: str) -> AbstractContextManager[Any]:
    """A surface for one panel, as tall as its neighbours in a row; `name` is unique on the page."""
    return st.container(border=True, key=f"card-{name}", gap="small", height="stretch")


def title(text: str, hint: str = "") -> None:
    """The heading of a card, with a word of explanation beside it."""
    note = f'<span class="u-hint">{escape(hint)}</span>' if hint else ""
    st.html(f'<h3 class="u-title">{escape(text)}{note}</h3>')


def chip(text: str, tone: Tone = "quiet") -> str:
    """A small label as HTML."""
    return f'<span class="u-chip u-{tone}">{escape(text)}</span>'


def empty(text: str) -> None:
    """What a panel shows when it has no data."""
    st.html(f'<p class="u-empty">{escape(text)}</p>')


def table(head: list[str], rows: list[list[str]], *, numeric: frozenset[int] = frozenset()) -> str:
    """An HTML table; cells are HTML already, columns in `numeric` are set flush right."""
    classes = ['class="u-num"' if column in numeric else "" for column in range(len(head))]
    top = "".join(f"<th {cls}>{escape(name)}</th>" for cls, name in zip(classes, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {cls}>{cell}</td>" for cls, cell in zip(classes, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="u-scroll"><table class="u-table"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def escape(text: object) -> str:
    """Text from the log as HTML text."""
    return html.escape(str(text))
