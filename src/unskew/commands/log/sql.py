"""`unskew sql`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, fail, locate, placed, refuse, there, warn
from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    import polars
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

TABLE_ROWS = 200
COUNTED_ROWS = 100_000
"""A table shows the first of its rows and counts up to here; a file gets all."""
_LEAST_COLUMN = 12
"""Text wrapped into columns narrower than this on average is unreadable."""
_UNBOUNDED = 1_000_000


def sql(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help='Such as "select * from verdicts".', show_default=False)
    ] = None,
    saved: Annotated[str | None, typer.Option(metavar="NAME", help="A saved query instead.", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the saved queries and what each answers.")] = False,
    format: Annotated[Literal["table", "csv", "json", "parquet"], typer.Option(help="The form of the rows.")] = "table",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the rows go.", show_default="the terminal", callback=placed)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="A query that runs longer is stopped.")
    ] = 30.0,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Ask the event log in SQL (DuckDB's); nothing can be written."""
    from unskew.collector.files import manifest
    from unskew.collector.read import console

    if list_:
        _list()
        return
    text = _text(query, saved)
    place = there(locate(store))
    if format == "parquet" and out is None and sys.stdout.isatty():
        refuse("--format parquet is binary: send it to a file with --out FILE")
    counted_only = format == "table" and json is None
    with checking_input():
        rows = console.query(place, text, timeout_s=timeout, row_limit=COUNTED_ROWS + 1 if counted_only else None)
        warn(manifest.load(place).problems)
    with holding("--json"):
        encoded = None if json is None else as_json(rows)
    with holding(f"--format {format}"):
        answer = formed(rows, format, sys.stdout if out is None else StringIO())
    if json is not None and encoded is not None:
        _write("--json", json, encoded)
    if out is not None:
        _write("--out", out, answer)
    elif isinstance(answer, bytes):
        sys.stdout.buffer.write(answer)
    else:
        # A terminal gets no orders from what is in a log; a pipe or a file gets the values as they are.
        sys.stdout.write(harmless(answer, sys.maxsize) if sys.stdout.isatty() and format != "table" else answer)


def _text(query: str | None, saved: str | None) -> str:
    """The query that is meant; exactly one of the two options that name it must be used."""
    from unskew.collector.read.saved_queries import saved_queries

    if query is not None and saved is None:
        return query
    known = saved_queries()
    if query is not None or saved is None:
        refuse('name one query: as text ("select * from runs"), or --saved NAME (unskew sql --list names them)')
    if saved not in known:
        refuse(f"there is no saved query {saved!r}, allowed: {', '.join(known)}")
    return known[saved].sql


def _list() -> None:
    from rich.table import Table

    from unskew.collector.read.saved_queries import saved_queries
    from unskew.terminal.console import SafeConsole

    grid = Table.grid(padding=(0, 2))
    for one in saved_queries().values():
        grid.add_row(f"[bold]{one.name}[/]", one.description)
    SafeConsole().print(grid)


@contextmanager
def holding(form: str) -> Iterator[None]:
    """Values that a form has no place for (lists in CSV, dates without end) are refused."""
    import polars

    try:
        with _silence():
            yield
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, ValueError, OverflowError) as error:
        refuse(f"{form} cannot hold this answer, cast what does not fit to varchar: {str(error).partition(chr(10))[0]}")


@contextmanager
def _silence() -> Iterator[None]:
    """Polars prints the stack of a panic on the file descriptor by itself."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def formed(rows: polars.DataFrame, format: str, terminal: TextIO) -> str | bytes:
    """The rows in their form; a table as `terminal` can show it."""
    if format == "csv":
        return rows.write_csv()
    if format == "json":
        return as_json(rows)
    if format == "parquet":
        rows.write_parquet(held := BytesIO())
        return held.getvalue()
    return _printed(rows, terminal)


def as_json(rows: polars.DataFrame) -> str:
    """The rows as a list of objects; sums and decimals as the numbers that they are: Polars would write them as text."""
    import polars

    numbers = {
        name: polars.Float64 if kind.scale else polars.Int128
        for name, kind in rows.schema.items()
        if isinstance(kind, polars.Decimal)
    }
    return rows.cast(numbers).write_json() + "\n"  # type: ignore[arg-type]


def _write(option: str, path: Path, answer: str | bytes) -> None:
    try:
        path.write_bytes(answer.encode() if isinstance(answer, str) else answer)
    except OSError as error:
        fail(f"{option} {path} could not be written whole: {error.strerror}")


def _printed(rows: polars.DataFrame, file: TextIO) -> str:
    from unskew.terminal.console import SafeConsole

    terminal = SafeConsole(file=file)
    grid = table(rows)
    needs = terminal.measure(grid, options=terminal.options.update(max_width=_UNBOUNDED))
    # Text may be wrapped at its words; a number or a name cut in two is no answer.
    wraps = needs.minimum <= terminal.width and rows.width * _LEAST_COLUMN <= terminal.width
    more = f", the first {TABLE_ROWS} shown (--format csv gives all)" if rows.height > TABLE_ROWS else ""
    count = f"more than {COUNTED_ROWS:,}" if rows.height == COUNTED_ROWS + 1 else f"{rows.height:,}"
    with terminal.capture() as printed:
        terminal.print(grid if needs.maximum <= terminal.width or wraps else records(rows))
        terminal.print(f"[dim]{count} row{'s' * (rows.height != 1)}{more}[/]")
    return printed.get()


def records(rows: polars.DataFrame) -> RenderableType:
    """The first rows one below the other, a value a line: for answers with more columns than the terminal has room for."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.table import Table

    parts: list[RenderableType] = []
    for number, row in enumerate(rows.head(TABLE_ROWS).iter_rows(), start=1):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")  # an answer cut off with three dots is none, on paper or in a pipe
        for name, value in zip(rows.columns, row, strict=True):
            grid.add_row(_cell(name), _cell(value))
        parts += [Rule(f"row {number}", align="left", style="dim"), grid]
    return Group(*parts)


def _cell(value: object) -> Text:
    """A value as text; NULL as a dash."""
    from rich.text import Text

    if value is None:
        return Text("–", "dim")
    return Text(f"{value:.6g}" if isinstance(value, float) else harmless(str(value)))


def table(rows: polars.DataFrame) -> Table:
    """The first rows as a table; numbers to the right, NULL as a dash; what is one word stays on one line."""
    from rich.table import Table

    grid = Table(header_style="bold")
    cells = [[_cell(value) for value in column] for column in rows.head(TABLE_ROWS).iter_columns()]
    for (name, dtype), column in zip(rows.schema.items(), cells, strict=True):
        one_word = not any(" " in cell.plain for cell in column)
        grid.add_column(_cell(name), justify="right" if dtype.is_numeric() else "left", no_wrap=one_word)
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    return grid
