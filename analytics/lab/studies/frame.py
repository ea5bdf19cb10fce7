"""The frame of every study: cells -> measured figures -> rows beside the paper's, over seeds.

A study names its cells (independent pieces of work, each with a seed), measures one cell (a pure function of it), and knows
what the paper has for each figure and why ours may differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Figures = dict[str, float | None]
"""Figure -> value; None = could not be had."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work: `params` are what `measure` needs besides the seed, `file` the table of the study's data set."""

    study: str
    name: str
    seed: int
    params: dict[str, Any] = {}
    file: str = ""

    def key(self, code: str) -> str:
        """Names the result: another seed, parameter or code (with its shipped data) is another result."""
        return hashlib.sha256(msgspec.json.encode((self, code))).hexdigest()[:20]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """`paper` goes by figure, `why` is a function of (figure, paper, ours). Two kinds of rows that sum up others, by group of
    figures ("" = none): `errors_of`, the mean error of those that the paper prints; `means_of`, the geometric mean. `needs`
    names the data set without which it cannot run: each cell's `measure` then gets the table in the cell's `file`, too; `draw`
    makes another plot than bars."""

    name: str
    about: str
    cells: Callable[[int], list[Cell]]
    measure: Callable[..., Figures]
    paper: Mapping[str, float | None] = {}
    why: Callable[[str, float | None, float | None], str] = lambda _figure, _paper, _ours: ""
    errors_of: Callable[[str], str] = lambda _figure: ""
    means_of: Callable[[str], str] = lambda _figure: ""
    unit: str = ""
    notes: tuple[str, ...] = ()
    needs: str = ""
    draw: Callable[[Sequence[StudyRow]], Figure] | None = None


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: mean and 95 % interval over seeds (None with one seed or when it does not vary), `ratio` = ours / paper."""

    figure: str
    paper: float | None
    ours: float | None
    low: float | None
    high: float | None
    n: int
    ratio: float | None
    why: str


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean (Student's t); None with fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean - reach, mean + reach


def study_rows(study: Study, points: Iterable[tuple[Cell, str, float | None]]) -> Iterator[StudyRow]:
    """A row per figure of the measured (cell, figure, value)."""
    values: dict[str, list[float | None]] = {}
    for _, figure, value in points:
        values.setdefault(figure, []).append(value)
    errors: dict[str, list[float]] = {}
    logs: dict[str, list[float]] = {}
    for figure, all_values in values.items():
        have = [value for value in all_values if value is not None]
        ours = float(np.mean(have)) if have else None
        reach = interval_of(have)
        paper = study.paper.get(figure)
        ratio = ours / paper if ours is not None and paper else None
        if ratio is not None and (group := study.errors_of(figure)):
            errors.setdefault(group, []).append(abs(ratio - 1.0))
        if ours and (group := study.means_of(figure)):
            logs.setdefault(group, []).append(math.log(ours))
        yield StudyRow(
            figure=figure, paper=paper, ours=ours, n=len(have),
            low=reach[0] if reach else None, high=reach[1] if reach else None,
            ratio=ratio, why=study.why(figure, paper, ours),
        )  # fmt: skip
    for group, all_logs in logs.items():
        figure, ours = f"geometric mean: {group}", math.exp(float(np.mean(all_logs)))
        paper = study.paper.get(figure)
        yield StudyRow(
            figure=figure, paper=paper, ours=ours, low=None, high=None, n=len(all_logs),
            ratio=ours / paper if paper else None, why=study.why(figure, paper, ours),
        )  # fmt: skip
    for group, all_errors in errors.items():
        yield StudyRow(
            figure=f"mean error against the printed cells of {group}, %", paper=None, ours=100.0 * float(np.mean(all_errors)),
            low=None, high=None, n=len(all_errors), ratio=None, why="",
        )  # fmt: skip
