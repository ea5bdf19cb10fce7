"""The frame of every study: cells -> measured figures -> rows beside the paper's, resumable, over seeds.

A study names its cells (independent pieces of work, each with a seed), measures one cell (a pure function of it), and knows
what the paper has for each figure and why ours may differ. Finished cells are kept in ``<out>/<study>/cells``: a study that was
interrupted goes on where it was. Cells run through joblib: processes here, Ray or Dask when such a backend is registered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import msgspec
import numpy as np
import polars as pl
from joblib.externals.loky import get_reusable_executor
from scipy import stats

from unskew.analytics.core import constants

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Figures = dict[str, float | None]
"""Figure -> value; None = could not be had (a job that aborted has no throughput)."""


class StudyError(ValueError):
    """A study that cannot run; one sentence."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work: `params` are what `measure` needs besides the seed."""

    study: str
    name: str
    seed: int
    params: dict[str, Any] = {}

    def key(self, code: str) -> str:
        """Names the result: another seed, parameter, constant or code is another result."""
        table = {name: constant.value for name, constant in constants.CONSTANTS.items()}
        return hashlib.sha256(msgspec.json.encode((self, code, table))).hexdigest()[:20]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """`paper` goes by figure, `why` is a function of (figure, paper, ours); `needs` names the data set without which it cannot
    run: its folder is given to `measure` as ``params["data"]``; `draw` makes another plot than bars."""

    name: str
    about: str
    cells: Callable[[int], list[Cell]]
    measure: Callable[[Cell], Figures]
    paper: Mapping[str, float | None] = {}
    why: Callable[[str, float | None, float | None], str] = lambda _figure, _paper, _ours: ""
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


class StudyResult(msgspec.Struct, frozen=True, kw_only=True):
    """A study's rows, its remarks, and where its files lie."""

    study: str
    about: str
    unit: str
    rows: tuple[StudyRow, ...]
    notes: tuple[str, ...]
    files: tuple[str, ...]


def run_study(
    study: Study,
    *,
    seeds: int,
    out: Path,
    jobs: int = 1,
    data: Path | None = None,
    on_cell: Callable[[int, int], None] = lambda _done, _all: None,
) -> StudyResult:
    """Measure what is missing, gather, write Parquet and a plot. `on_cell` hears (done, all).

    `data` is the folder of data sets; raises `StudyError` when the one that the study needs is not there.
    """
    cells = study.cells(seeds)
    if study.needs:
        place = data / study.needs if data is not None else None
        if place is None or not place.is_dir():
            raise StudyError(f"study {study.name} needs the data set {study.needs}: name the folder that holds it with --data")
        cells = [msgspec.structs.replace(cell, params=cell.params | {"data": str(place)}) for cell in cells]
    folder = out / study.name
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    code = code_and_tables()
    done: dict[int, Figures] = {}
    for number, cell in enumerate(cells):
        path = folder / "cells" / f"{cell.key(code)}.json"
        if path.exists():
            done[number] = msgspec.json.decode(path.read_bytes(), type=Figures)
    on_cell(len(done), len(cells))
    missing = [number for number in range(len(cells)) if number not in done]
    work = (joblib.delayed(_measure)(study.measure, number, cells[number]) for number in missing)
    for number, figures in joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(work):
        done[number] = figures
        path = folder / "cells" / f"{cells[number].key(code)}.json"
        half = path.with_suffix(".half")
        half.write_bytes(msgspec.json.encode(figures))
        half.replace(path)
        on_cell(len(done), len(cells))
    if jobs != 1:
        get_reusable_executor().shutdown(wait=True)  # joblib keeps its processes for a next call that does not come
    points = [(cells[number], figure, value) for number in sorted(done) for figure, value in done[number].items()]
    rows = tuple(_rows(study, points))
    files = _write(folder, study, points, rows)
    return StudyResult(study=study.name, about=study.about, unit=study.unit, rows=rows, notes=study.notes, files=files)


def _measure(measure: Callable[[Cell], Figures], number: int, cell: Cell) -> tuple[int, Figures]:
    return number, {figure: None if value is None else float(value) for figure, value in measure(cell).items()}


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean (Student's t); None with fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean - reach, mean + reach


def _rows(study: Study, points: Iterable[tuple[Cell, str, float | None]]) -> Iterable[StudyRow]:
    values: dict[str, list[float | None]] = {}
    for _, figure, value in points:
        values.setdefault(figure, []).append(value)
    for figure, all_values in values.items():
        have = [value for value in all_values if value is not None]
        ours = float(np.mean(have)) if have else None
        reach = interval_of(have)
        paper = study.paper.get(figure)
        yield StudyRow(
            figure=figure, paper=paper, ours=ours, n=len(have),
            low=reach[0] if reach else None, high=reach[1] if reach else None,
            ratio=ours / paper if ours is not None and paper else None, why=study.why(figure, paper, ours),
        )  # fmt: skip


def _write(
    folder: Path, study: Study, points: Sequence[tuple[Cell, str, float | None]], rows: Sequence[StudyRow]
) -> tuple[str, ...]:
    from unskew.analytics.lab.studies.plots import write_plot  # noqa: PLC0415  # half a second that only a finished study pays

    table = folder / "points.parquet"
    pl.DataFrame(
        [(cell.name, cell.seed, figure, value) for cell, figure, value in points],
        schema={"cell": pl.String, "seed": pl.Int64, "figure": pl.String, "value": pl.Float64},
        orient="row",
    ).write_parquet(table)
    summary = folder / "rows.parquet"
    pl.DataFrame([msgspec.structs.asdict(row) for row in rows], infer_schema_length=None).write_parquet(summary)
    plot = folder / "plot.html"
    write_plot(plot, study, rows)
    return str(table), str(summary), str(plot)


def code_and_tables(root: Path = Path(constants.__file__).parents[1]) -> str:
    """Hash of everything in analytics that makes a result: modules and the tables beside them."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in {".py", ".toml"}):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
