"""`unskew sql`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Annotated, Literal, TextIO

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
_SLICE_ROWS = 100_000
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
    with TemporaryFile() as also, TemporaryFile() as answer:
        if json is not None:
            _form(rows, "json", "--json", also)
        if format == "table":
            with holding("--format table"):
                answer.write(_printed(rows, sys.stdout if out is None else StringIO()).encode())
        else:
            _form(rows, format, f"--format {format}", answer)
        if json is not None:
            _copy("--json", also, json)
        if out is not None:
            _copy("--out", answer, out)
            return
        answer.seek(0)
        if sys.stdout.isatty() and format != "table":
            # A terminal gets no orders from what is in a log; a pipe or a file gets the values as they are.
            sys.stdout.write(harmless(answer.read().decode(), sys.maxsize))
        else:
            sys.stdout.flush()
            shutil.copyfileobj(answer, sys.stdout.buffer)


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


def _form(rows: polars.DataFrame, format: str, option: str, file: IO[bytes]) -> None:
    """Write the rows in a form, a slice at a time: a number takes eight times the room as text."""
    try:
        with holding(option):
            if format == "parquet":
                rows.write_parquet(file)
            elif format == "csv":
                for first in range(0, max(1, rows.height), _SLICE_ROWS):
                    rows.slice(first, _SLICE_ROWS).write_csv(file, include_header=first == 0)
            else:
                for part in _json_parts(rows):
                    file.write(part.encode())
    except OSError as error:
        fail(f"{option}: no room for the answer in {gettempdir()}: {error.strerror}")


def _json_parts(rows: polars.DataFrame) -> Iterator[str]:
    """The rows as a list of objects; sums and decimals as the numbers that they are: Polars would write them as text."""
    import polars

    numbers = {
        name: polars.Float64 if kind.scale else polars.Int128
        for name, kind in rows.schema.items()
        if isinstance(kind, polars.Decimal)
    }
    yield "["
    for first in range(0, rows.height, _SLICE_ROWS):
        objects = rows.slice(first, _SLICE_ROWS).cast(numbers).write_json()  # type: ignore[arg-type]
        yield ("," if first else "") + objects[1:-1]
    yield "]\n"


def _copy(option: str, answer: IO[bytes], path: Path) -> None:
    try:
        answer.seek(0)
        with path.open("wb") as file:
            shutil.copyfileobj(answer, file)
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
    cells = [[_cell(value) for value in column.to_list()] for column in rows.head(TABLE_ROWS).iter_columns()]
    for (name, dtype), column in zip(rows.schema.items(), cells, strict=True):
        one_word = not any(" " in cell.plain for cell in column)
        grid.add_column(_cell(name), justify="right" if dtype.is_numeric() else "left", no_wrap=one_word)
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    return grid
