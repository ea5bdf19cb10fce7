"""Running a study: its cells measured in processes, each kept in a file, and its tables and plot.

Finished cells are kept in ``<out>/<study>/cells``: a study that was interrupted goes on where it was. Cells run through joblib:
processes here, Ray or Dask when such a backend is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import joblib
import msgspec
import polars as pl
from joblib.externals.loky import get_reusable_executor

from unskew.analytics.core.code_hash import code_hash
from unskew.analytics.lab.studies.frame import Cell, Figures, Study, StudyRow, study_rows
from unskew.edge.tables import read_table

_PLOT_LIBRARY = "plotly.min.js"


class StudyError(ValueError):
    """A study that cannot run; one sentence."""


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
        cells = [msgspec.structs.replace(cell, file=str(place / cell.file)) for cell in cells]
    folder, code = out / study.name, code_hash()
    kept = [folder / "cells" / f"{cell.key(code)}.json" for cell in cells]
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    done = {number: msgspec.json.decode(path.read_bytes(), type=Figures) for number, path in enumerate(kept) if path.exists()}
    on_cell(len(done), len(cells))
    missing = [number for number in range(len(cells)) if number not in done]
    work = (joblib.delayed(_measure)(study.measure, number, cells[number]) for number in missing)
    for number, figures in joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(work):
        done[number] = figures
        half = kept[number].with_suffix(".half")
        half.write_bytes(msgspec.json.encode(figures))
        half.replace(kept[number])
        on_cell(len(done), len(cells))
    if jobs != 1:
        get_reusable_executor().shutdown(wait=True)  # joblib keeps its processes for a next call that does not come
    points = [(cells[number], figure, value) for number in sorted(done) for figure, value in done[number].items()]
    rows = tuple(study_rows(study, points))
    files = _write(folder, study, points, rows)
    return StudyResult(study=study.name, about=study.about, unit=study.unit, rows=rows, notes=study.notes, files=files)


def _measure(measure: Callable[..., Figures], number: int, cell: Cell) -> tuple[int, Figures]:
    figures = measure(cell, read_table(Path(cell.file))) if cell.file else measure(cell)
    return number, {figure: None if value is None else float(value) for figure, value in figures.items()}


def _write(
    folder: Path, study: Study, points: Sequence[tuple[Cell, str, float | None]], rows: Sequence[StudyRow]
) -> tuple[str, ...]:
    table, summary, plot = (folder / name for name in ("points.parquet", "rows.parquet", "plot.html"))
    pl.DataFrame(
        [(cell.name, cell.seed, figure, value) for cell, figure, value in points],
        schema={"cell": pl.String, "seed": pl.Int64, "figure": pl.String, "value": pl.Float64},
        orient="row",
    ).write_parquet(table)
    pl.DataFrame([msgspec.structs.asdict(row) for row in rows], infer_schema_length=None).write_parquet(summary)
    _write_plot(plot, study, rows)
    return str(table), str(summary), str(plot)


def _write_plot(path: Path, study: Study, rows: Sequence[StudyRow]) -> None:
    """A page that is readable without a network; plotly's own code lies once beside the studies' folders."""
    from plotly.offline import get_plotlyjs  # half a second that only a finished study pays

    from unskew.analytics.lab.studies.plots import draw

    library = path.parent.parent / _PLOT_LIBRARY
    if not library.exists():
        library.write_text(get_plotlyjs(), encoding="utf-8")
    draw(study, rows).write_html(path, include_plotlyjs=f"../{_PLOT_LIBRARY}")
