"""`unskew sql`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, locate, refuse, warn

if TYPE_CHECKING:
    import polars
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

TABLE_ROWS = 200
COUNTED_ROWS = 100_000
"""A table shows the first of its rows and counts up to here; a file gets all."""
_LEAST_COLUMN = 12


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help='Such as "select * from verdicts".', show_default=False)],
    format: Annotated[Literal["table", "csv", "json", "parquet"], typer.Option(help="How the rows are printed.")] = "table",
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Ask the event log in SQL (DuckDB's); nothing can be written."""
    from unskew.collector import console, manifest

    place = locate(store)
    if format == "parquet" and sys.stdout.isatty():
        refuse("--format parquet is binary: send it to a file with > FILE")
    counted_only = format == "table" and json is None
    with checking_input():
        rows = console.query(place, query, row_limit=COUNTED_ROWS + 1 if counted_only else None)
        warn(manifest.load(place).problems)
    if json is not None:
        with holding("--json"):
            rows.write_json(json)
    with holding(f"--format {format}"):
        show(rows, format)


@contextmanager
def holding(form: str) -> Iterator[None]:
    """Values that a form has no place for (lists in CSV, dates without end) are refused."""
    import polars

    try:
        yield
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, ValueError, OverflowError) as error:
        refuse(f"{form} cannot hold this answer, cast what does not fit to varchar: {str(error).partition(chr(10))[0]}")


def show(rows: polars.DataFrame, format: str) -> None:
    """The rows on stdout."""
    from rich.console import Console

    if format == "csv":
        sys.stdout.write(rows.write_csv())
    elif format == "json":
        print(rows.write_json())
    elif format == "parquet":
        rows.write_parquet(sys.stdout.buffer)
    else:
        terminal = Console()
        grid = table(rows)
        # A table squeezed into columns of a letter each tells nothing: then one line a value.
        roomy = terminal.measure(grid).maximum <= terminal.width or rows.width * _LEAST_COLUMN <= terminal.width
        terminal.print(grid if roomy else records(rows))
        more = f", the first {TABLE_ROWS} shown (--format csv gives all)" if rows.height > TABLE_ROWS else ""
        count = f"more than {COUNTED_ROWS:,}" if rows.height == COUNTED_ROWS + 1 else f"{rows.height:,}"
        terminal.print(f"[dim]{count} row{'s' * (rows.height != 1)}{more}[/]")


def records(rows: polars.DataFrame) -> RenderableType:
    """The first rows one below the other, a value a line: for answers with more columns than the terminal has room for."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.table import Table

    parts: list[RenderableType] = []
    for number, row in enumerate(rows.head(TABLE_ROWS).iter_rows(), start=1):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        for name, value in zip(rows.columns, row, strict=True):
            grid.add_row(name, _cell(value))
        parts += [Rule(f"row {number}", align="left", style="dim"), grid]
    return Group(*parts)


def _cell(value: object) -> Text:
    """A value as text; NULL as a dash."""
    from rich.text import Text

    return Text("–", "dim") if value is None else Text(f"{value:.6g}" if isinstance(value, float) else str(value))


def table(rows: polars.DataFrame) -> Table:
    """The first rows as a table; numbers to the right, NULL as a dash."""
    from rich.table import Table

    grid = Table(header_style="bold")
    for name, dtype in rows.schema.items():
        grid.add_column(name, justify="right" if dtype.is_numeric() else "left")
    for row in rows.head(TABLE_ROWS).iter_rows():
        grid.add_row(*map(_cell, row))
    return grid
