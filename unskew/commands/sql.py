"""`unskew sql`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, locate, refuse

if TYPE_CHECKING:
    import polars
    from rich.table import Table

TABLE_ROWS = 200


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help='Such as "select * from verdicts".', show_default=False)],
    format: Annotated[Literal["table", "csv", "json", "parquet"], typer.Option(help="How the rows are printed.")] = "table",
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Ask the event log in SQL (DuckDB's); nothing can be written."""
    from unskew.collector import console

    place = locate(store)
    if format == "parquet" and sys.stdout.isatty():
        refuse("--format parquet is binary: send it to a file with > FILE")
    with checking_input():
        rows = console.query(place, query)
    if json is not None:
        rows.write_json(json)
    show(rows, format)


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
        terminal.print(table(rows))
        more = f", the first {TABLE_ROWS} shown (--format csv gives all)" if rows.height > TABLE_ROWS else ""
        terminal.print(f"[dim]{rows.height:,} row{'s' * (rows.height != 1)}{more}[/]")


def table(rows: polars.DataFrame) -> Table:
    """The first rows as a table; numbers to the right, NULL as a dash."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(header_style="bold")
    for name, dtype in rows.schema.items():
        grid.add_column(name, justify="right" if dtype.is_numeric() else "left")
    for row in rows.head(TABLE_ROWS).iter_rows():
        grid.add_row(
            *(
                Text("–", "dim") if value is None else Text(f"{value:.6g}" if isinstance(value, float) else str(value))
                for value in row
            )
        )
    return grid
