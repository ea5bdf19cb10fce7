"""iteration-times: a table of run, step, seconds, as CSV or Parquet. One run of the store per value of `run`.

`run` may be absent (one run); `rank`, `loss` and `tokens` may be there. A step that a run (and rank) has again further down is
another attempt of a restarted job, of which the last counts. A folder is the tables of a run's ranks, each with a column rank
or a name with its number.

Parts of a step that were timed apart (`PARTS`, seconds) become `Span`s, laid one after the other from the beginning of the
step, which all ranks begin together: no table says how far apart they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars

from unskew.collector.events import IterationTimed, SpanKind, Telemetry
from unskew.collector.formats.attempts import gone_back, note_of, notes_of_gone_back
from unskew.collector.formats.columns import parquet, typed
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun, source_files
from unskew.collector.formats.parts import spans_of
from unskew.collector.formats.text import content, rank_number

PARTS: dict[str, SpanKind] = {
    "data_wait": "data_wait", "forward": "F", "backward": "B", "all_reduce": "all_reduce", "optimizer": "optimizer",
}  # fmt: skip
"""Columns -> what they time, in the order of a step."""

_NEEDED: dict[str, Any] = {"step": polars.Int64(), "seconds": polars.Float64()}
_OPTIONAL: dict[str, Any] = {
    "run": polars.String(), "rank": polars.Int32(), "loss": polars.Float64(), "tokens": polars.Int64(),
    **dict.fromkeys(PARTS, polars.Float64()),
}  # fmt: skip
_COUNTS = ("step", "rank", "tokens")
_MOST_OF_STEPS = 2
"""A part that takes so many times as long as its step is in another unit; a little longer are those a GPU timed by itself."""
_ROUNDED = 1.01
"""Parts that add up to so many times their step, or less, are rounded."""
_SECONDS = "positive number up to 2^33"
_REPEATED = "times of single ranks need a column rank"


def read(path: Path) -> Sequence[ImportedRun]:
    """A run per value of the column `run`, in the order of the table. Raises `FormatError`."""
    files = source_files(path, ".csv", ".csv.gz", ".parquet")
    tables = [_checked(file, _load(file) if file == path else _of_rank(file, _load(file))) for file in files]
    seen: dict[int, Path] = {}
    for file, table in zip(files, tables, strict=True) if path.is_dir() else ():
        for rank in table["rank"].unique():
            if seen.setdefault(rank, file) != file:
                raise FormatError(f"{file}: {seen[rank].name} is of rank {rank} too, one file per rank is needed")
    rows = polars.concat(tables, how="diagonal")
    parts = rows.group_by("run", maintain_order=True) if "run" in rows.columns else [(("",), rows)]
    return [_run(str(name), part) for (name,), part in parts]


def _of_rank(file: Path, rows: polars.DataFrame) -> polars.DataFrame:
    """The table of a file in a folder, with the rank that it is of."""
    if "rank" in rows.columns:
        return rows
    if (found := re.search(r"rank[_-]?(\d+)", file.name)) is None:
        raise FormatError(f"{file}: neither a column nor its name has the rank")
    return rows.with_columns(rank=polars.lit(rank_number(str(file), float(found[1])), polars.Int64))


def _run(name: str, rows: polars.DataFrame) -> ImportedRun:
    ranks = rows["rank"].n_unique() if "rank" in rows.columns else 0
    again = rows.filter(polars.col("attempt") > 0)
    of_ranks = rows.partition_by("rank", maintain_order=True) if ranks else [rows]
    back = [one for own in of_ranks for one in gone_back(own["step"].to_list())]
    return ImportedRun(
        name=name,
        events=_events(rows),
        ranks=ranks,
        iterations=rows["step"].n_unique(),
        facts={
            "observed": "iteration times per rank" if ranks else "iteration times of the job",
            "told_again": again.height,
            "went_back": back,
        },
        notes=(*note_of(again["step"].to_list(), again.height), *notes_of_gone_back(back), *_notes_of_overfull(rows)),
    )


def _notes_of_overfull(rows: polars.DataFrame) -> tuple[str, ...]:
    """The sentence on steps whose parts add up to more than they took; some begin only when their input is there."""
    within = [name for name in PARTS if name in rows.columns and name != "data_wait"]
    if not within:
        return ()
    over = rows.with_columns(parts=polars.sum_horizontal(within)).filter(polars.col("parts") > _ROUNDED * polars.col("seconds"))
    if over.is_empty():
        return ()
    one, more = over.row(0, named=True), f", and in other rows ({over.height} in all)" if over.height > 1 else ""
    return (
        f"{', '.join(within)} add up to {one['parts']:.4g} s in iteration {one['step']} of rank {one['rank']}, which took "
        f"{one['seconds']:.4g} s by its column seconds{more}: their spans reach beyond its end",
    )


def _events(rows: polars.DataFrame) -> Iterator[Telemetry]:
    longest = rows.group_by("step").agg(polars.col("seconds").max()).sort("step")
    begins = dict(zip(longest["step"], longest["seconds"].cum_sum() - longest["seconds"], strict=True))
    for row in rows.iter_rows(named=True):
        step = IterationTimed(
            iteration=row["step"],
            wall_us=round(row["seconds"] * 1e6),
            rank=row.get("rank"),
            loss=row.get("loss"),
            tokens=row.get("tokens"),
            attempt=row["attempt"],
        )
        yield step
        if step.rank is not None:
            parts = [(kind, round(row[name] * 1e6)) for name, kind in PARTS.items() if row.get(name) is not None]
            yield from spans_of(step, step.rank, round(begins[step.iteration] * 1e6), parts)


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


def _longer(part: polars.Expr) -> polars.Expr:
    """Rows in which it takes many times as long as its step, where most do."""
    longer = part > _MOST_OF_STEPS * polars.col("seconds")
    return longer & (longer.mean() > 0.5)


def _checked(path: Path, rows: polars.DataFrame) -> polars.DataFrame:
    """The known columns in their types, and `attempt`; a row that does not fit is named (the first under a header is 1)."""
    types = {name: kind for name, kind in (_OPTIONAL | _NEEDED).items() if name in rows.columns}
    timed = [name for name in PARTS if name in types]
    within = [name for name in timed if name != "data_wait"]  # some steps begin when their input is there
    if timed and "rank" not in types:
        raise FormatError(f"{path}: {timed[0]} is a part of one rank's step, and no column rank says whose")
    table = typed(path, rows, types, {"seconds": _SECONDS})
    identity = [name for name in ("run", "rank", "step") if name in types]
    column = polars.col
    others = [name for name in identity if name != "step"]
    same = column("step") == (column("step").shift(1).over(others) if others else column("step").shift(1))
    wrong = {
        **{f"{name} is no number" if name != "run" else "run is missing": column(name).is_null() for name in identity},
        f"seconds is no {_SECONDS}": ~column("seconds").is_between(0, LARGEST / 1e6, closed="right").fill_null(value=False),
        **{f"{name} is not between 0 and 2^33 seconds": ~column(name).is_between(0, LARGEST / 1e6) for name in timed},
        **{f"{name} is longer than the step, as in most rows: is it in seconds?": _longer(column(name)) for name in within},
        **{f"{name} is not between 0 and 2^53": ~column(name).is_between(0, LARGEST) for name in _COUNTS if name in types},
        f"the row before has the same {' and '.join(identity)}, and so it is with most rows: {_REPEATED}": same
        & same.mean().ge(0.5),
    }
    for sentence, condition in wrong.items():
        at = table.select(condition.arg_true()).to_series()
        if len(at):
            raise FormatError(f"{path}, row {at[0] + 1}: {sentence}")
    return table.with_columns(attempt=polars.int_range(polars.len()).over(identity))
