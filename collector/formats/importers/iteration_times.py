"""iteration-times: a table of run, step, seconds, as CSV or Parquet. One run of the store per value of `run`.

`run` may be absent (one run); `rank`, `loss` and `tokens` may be there. A step that a run (and rank) has again further down is
another attempt of a restarted job, of which the last counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars

from unskew.collector.events import IterationTimed
from unskew.collector.formats.attempts import note_of
from unskew.collector.formats.columns import parquet, typed
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun
from unskew.collector.formats.text import content

_NEEDED: dict[str, Any] = {"step": polars.Int64(), "seconds": polars.Float64()}
_OPTIONAL: dict[str, Any] = {
    "run": polars.String(), "rank": polars.Int32(), "loss": polars.Float64(), "tokens": polars.Int64(),
}  # fmt: skip

_COUNTS = ("step", "rank", "tokens")
_SECONDS = "positive number up to 2^33"
_REPEATED = "times of single ranks need a column rank"


def read(path: Path) -> Sequence[ImportedRun]:
    """A run per value of the column `run`, in the order of the table. Raises `FormatError`."""
    rows = _checked(path, _load(path))
    parts = rows.group_by("run", maintain_order=True) if "run" in rows.columns else [(("",), rows)]
    return [_run(str(name), part) for (name,), part in parts]


def _run(name: str, rows: polars.DataFrame) -> ImportedRun:
    ranks = rows["rank"].n_unique() if "rank" in rows.columns else 0
    again = rows.filter(polars.col("attempt") > 0)
    return ImportedRun(
        name=name,
        events=_events(rows),
        ranks=ranks,
        iterations=rows["step"].n_unique(),
        facts={
            "observed": "iteration times per rank" if ranks else "iteration times of the job",
            "told_again": again.height,
        },
        notes=note_of(again["step"].to_list(), again.height),
    )


def _events(rows: polars.DataFrame) -> Iterator[IterationTimed]:
    for row in rows.iter_rows(named=True):
        yield IterationTimed(
            iteration=row["step"],
            wall_us=round(row["seconds"] * 1e6),
            rank=row.get("rank"),
            loss=row.get("loss"),
            tokens=row.get("tokens"),
            attempt=row["attempt"],
        )


def _load(path: Path) -> polars.DataFrame:
    if not path.is_file():
        raise FormatError(f"{path}: a CSV or Parquet file is needed here")
    raw = content(path)
    try:
        rows = parquet(path) if raw.startswith(b"PAR1") else polars.read_csv(raw, infer_schema=False)
    except polars.exceptions.PolarsError as error:
        raise FormatError(f"{path} is neither CSV nor Parquet: {str(error).partition(chr(10))[0]}") from error
    missing = [name for name in _NEEDED if name not in rows.columns]
    if missing:
        raise FormatError(f"{path} lacks the columns {', '.join(missing)}; needed are step, seconds and, for many runs, run")
    if rows.is_empty():
        raise FormatError(f"{path} has no rows")
    return rows


def _checked(path: Path, rows: polars.DataFrame) -> polars.DataFrame:
    """The known columns in their types, and `attempt`; a row that does not fit is named (the first under a header is 1)."""
    types = {name: kind for name, kind in (_OPTIONAL | _NEEDED).items() if name in rows.columns}
    table = typed(path, rows, types, {"seconds": _SECONDS})
    identity = [name for name in ("run", "rank", "step") if name in types]
    column = polars.col
    others = [name for name in identity if name != "step"]
    same = column("step") == (column("step").shift(1).over(others) if others else column("step").shift(1))
    wrong = {
        **{f"{name} is no number" if name != "run" else "run is missing": column(name).is_null() for name in identity},
        f"seconds is no {_SECONDS}": ~column("seconds").is_between(0, LARGEST / 1e6, closed="right").fill_null(value=False),
        **{f"{name} is not between 0 and 2^53": ~column(name).is_between(0, LARGEST) for name in _COUNTS if name in types},
        f"the row before has the same {' and '.join(identity)}, and so it is with most rows: {_REPEATED}": same
        & same.mean().ge(0.5),
    }
    for sentence, condition in wrong.items():
        at = table.select(condition.arg_true()).to_series()
        if len(at):
            raise FormatError(f"{path}, row {at[0] + 1}: {sentence}")
    return table.with_columns(attempt=polars.int_range(polars.len()).over(identity))
