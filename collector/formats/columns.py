"""Reading people's tables: a Parquet file as it is, and columns in the types that a format wants, nothing bent to fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars
import pyarrow  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet  # type: ignore[import-untyped]

from unskew.collector.formats.imported import FormatError

_TEXTS = (polars.String, polars.Categorical, polars.Enum)


def parquet(path: Path) -> polars.DataFrame:
    """The rows of a Parquet file. Raises `FormatError`.

    Polars' own reader takes a path with [ or * for a pattern, so for other files, and dies of some flipped bytes.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read()
        table.validate(full=True)
        found = polars.from_arrow(table.replace_schema_metadata().rename_columns(table.column_names))
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError, polars.exceptions.PolarsError) as error:
        raise FormatError(f"{path} is not a Parquet file: {str(error).partition(chr(10))[0]}") from error
    assert isinstance(found, polars.DataFrame)
    return found


def typed(path: Path, rows: polars.DataFrame, types: Mapping[str, Any], words: Mapping[str, str]) -> polars.DataFrame:
    """The columns of `types`; empty texts are missing values. Raises `FormatError` at a column of another kind (a date is no
    number) and at a value that would change (1.5 is no step); `words` describe what a column should be where "number" does not.
    """
    for name, wanted in types.items():
        kind = rows.schema[name]
        if not (isinstance(kind, (*_TEXTS, polars.Null)) or kind.is_integer() or (kind.is_numeric() and wanted.is_numeric())):
            needed = "numbers" if wanted.is_numeric() else "texts"
            raise FormatError(f"{path}: column {name} is of type {kind}, {needed} are needed")
    given = rows.select(
        polars.col(name).cast(polars.String).str.strip_chars().replace("", None)
        if isinstance(rows.schema[name], _TEXTS)
        else polars.col(name)
        for name in types
    )
    found = given.select(polars.col(name).cast(wanted, strict=False) for name, wanted in types.items())
    for name, wanted in types.items():
        was, now = given[name], found[name]
        changed = was.is_not_null() & now.is_null()
        if wanted.is_integer() and was.dtype.is_float():
            changed |= was.is_nan() | (was != now.cast(polars.Float64))
        at = changed.fill_null(value=False).arg_true()
        if len(at):
            limits = f", a whole number that {wanted} holds is needed" if wanted.is_integer() else ""
            raise FormatError(f"{path}, row {at[0] + 1}: {name} is no {words.get(name, 'number')}: {was[at[0]]!r}{limits}")
    return found
