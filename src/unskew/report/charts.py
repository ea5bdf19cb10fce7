"""Charts as SVG in the page itself: no script, no font and no host is needed to look at them; each point names its value."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log

import msgspec

WIDTH, LEFT, RIGHT = 1000, 64, 12
Point = tuple[float, float]
SLOWEST = 2.0
"""Times the expected time, at which a cell has its full colour."""


class ChartMark(msgspec.Struct, frozen=True):
    """Something that happened at an iteration; `kind` is a class of the stylesheet."""

    at: float
    kind: str
    text: str


class Line(msgspec.Struct, frozen=True):
    """A series; `kind` is a class of the stylesheet."""

    name: str
    kind: str
    points: Sequence[Point]


def lines(series: Sequence[Line], marks: Sequence[ChartMark], *, height: int = 240, unit: str = "ms") -> str:
    """Values over iterations."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    most = _ceiling(sorted(y for _, y in points)[int(0.995 * (len(points) - 1))])
    top, bottom = 18, height - 26

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - first) / max(last - first, 1)

    def at_y(y: float) -> float:
        return bottom - (bottom - top) * min(y / most, 1.0)

    parts = [_grid(y, f"{y:g} {unit}", at_y(y)) for y in (0.0, most / 2, most)]
    parts += [_mark(mark, at_x(mark.at), top - 8, bottom) for mark in marks if first <= mark.at <= last]
    for one in series:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="{one.kind}" points="{path}"><title>{escape(one.name)}</title></polyline>')
    parts += _iterations(first, last, height - 6)
    return _svg(parts, height, "Time of an iteration")


def heatmap(rows: Sequence[tuple[str, Sequence[float | None]]], first: int, last: int, marks: Sequence[ChartMark]) -> str:
    """Rank by iteration: measured over expected, 1.0 = as expected; None = nothing was measured."""
    columns = max((len(values) for _, values in rows), default=0)
    if not columns:
        return ""
    each, row = (WIDTH - LEFT - RIGHT) / columns, max(10, min(26, 520 // len(rows)))
    height = 18 + row * len(rows) + 26
    parts = []
    for number, (name, values) in enumerate(rows):
        y = 18 + number * row
        parts.append(f'<text class="label" x="{LEFT - 8}" y="{y + row / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for column, value in enumerate(values):
            if value is None:
                continue
            look, strength = _shade(value)
            at = first + round(column * (last - first + 1) / columns)
            parts.append(
                f'<rect class="{look}" x="{LEFT + column * each:.2f}" y="{y}" width="{each + 0.3:.2f}" height="{row - 1.5}" '
                f'fill-opacity="{strength:.2f}"><title>{escape(name)}, iteration {at}: {value:.2f} times the expected</title>'
                "</rect>"
            )
    span = max(last - first, 1)
    for mark in marks:
        if first <= mark.at <= last:
            x = LEFT + (WIDTH - LEFT - RIGHT) * (mark.at - first) / span
            parts.append(_mark(mark, x, 8, 18 + row * len(rows)))
    parts += _iterations(first, last, height - 6)
    return _svg(parts, height, "Compute time by rank")


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], unit: str = "ms") -> str:
    """A stacked bar per row; a part is (class, name, value)."""
    most = max((sum(value for _, _, value in parts) for _, parts in rows), default=0.0)
    if most <= 0:
        return ""
    row, found = 28, []
    scale = (WIDTH - LEFT - RIGHT - 90) / most
    for number, (name, of) in enumerate(rows):
        y, x = number * row + 4, float(LEFT)
        found.append(f'<text class="label" x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for look, what, value in of:
            title = f"{escape(name)}, {escape(what)}: {value:.2f} {unit}"
            width = value * scale
            found.append(
                f'<rect class="{look}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 8}"><title>{title}</title></rect>'
            )
            x += width
        whole = sum(value for _, _, value in of)
        found.append(f'<text class="value" x="{x + 8:.1f}" y="{y + 15}">{whole:.1f} {unit}</text>')
    return _svg(found, row * len(rows) + 6, "Time by phase")


def _shade(value: float) -> tuple[str, float]:
    """Slower is orange, faster blue; as expected is nearly nothing."""
    strength = min(abs(log(max(value, 1e-3))) / log(SLOWEST), 1.0)
    return ("slow" if value > 1 else "fast"), 0.1 + 0.9 * strength


def _ceiling(value: float) -> float:
    """A round number that is a little more."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    return next(scale * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20) if scale * step >= 1.05 * value)


def _grid(y: float, text: str, at: float) -> str:
    label = f'<text class="axis" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text if y else "0")}</text>'
    return f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>{label}'


def _mark(mark: ChartMark, x: float, top: float, bottom: float) -> str:
    return (
        f'<g class="mark {mark.kind}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 6}" y2="{bottom}"/>'
        f'<circle cx="{x:.1f}" cy="{top}" r="4.5"/><title>{escape(mark.text)}</title></g>'
    )


def _iterations(first: float, last: float, y: float) -> list[str]:
    middle = (first + last) / 2
    places = ((LEFT, "start", first), (LEFT + (WIDTH - LEFT - RIGHT) / 2, "middle", middle), (WIDTH - RIGHT, "end", last))
    return [
        f'<text class="axis" x="{x}" y="{y}" text-anchor="{anchor}">{"iteration " if anchor == "start" else ""}{at:.0f}</text>'
        for x, anchor, at in places
    ]


def _svg(parts: Sequence[str], height: float, what: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(what)}">{"".join(parts)}</svg>'
