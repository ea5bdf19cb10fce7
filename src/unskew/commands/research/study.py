"""`unskew study`: a paper's table or figure, simulated, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.commands.common import JsonOption, fail, refuse, write_json

if TYPE_CHECKING:
    from unskew.edge.run_study import StudyResult


def study(
    name: Annotated[str, typer.Argument(help="Which study; an unknown name lists them all.", show_default=False)],
    seeds: Annotated[int, typer.Option(help="Random placements and arrivals; intervals are over these.")] = 5,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results, tables and plots are kept.")] = Path("data/studies"),
    jobs: Annotated[int, typer.Option(help="Processes; -1 = one per core.")] = 1,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of public data sets.", envvar="UNSKEW_DATASETS")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Reproduce a paper's table: its figure, ours, the ratio, and why they differ. It resumes where it was interrupted."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from unskew.analytics.lab.studies.registry import STUDIES
    from unskew.edge.run_study import StudyError, run_study
    from unskew.terminal.console import SafeConsole

    if name not in STUDIES:
        refuse(f"there is no study {name!r}, allowed: {', '.join(STUDIES)}")
    if seeds < 1 or jobs == 0:
        refuse("--seeds must be at least 1 and --jobs not 0")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {out}: cannot be created: {error.strerror}")
    console = SafeConsole()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(name)
        try:
            result = run_study(
                STUDIES[name], seeds=seeds, out=out, jobs=jobs, data=data,
                on_cell=lambda done, all_: progress.update(task, completed=done, total=all_),
            )  # fmt: skip
        except StudyError as error:
            refuse(str(error))
        except OSError as error:
            fail(f"study {name}: {error}")
    _print(console, result)
    write_json(json, result)


def _print(console: object, result: StudyResult) -> None:
    from rich.table import Table

    from unskew.terminal.console import SafeConsole

    assert isinstance(console, SafeConsole)
    title = f"{result.study}: {result.about}" + (f" · {result.unit}" if result.unit else "")
    grid = Table("figure", title=title, title_justify="left")
    for column in ("paper", "ours", "interval", "ratio"):
        grid.add_column(column, justify="right")
    grid.add_column("why", justify="right")
    whys = list(dict.fromkeys(row.why for row in result.rows if row.why))
    for row in result.rows:
        reach = "" if row.low is None or row.high is None else f"{row.low:.3f} .. {row.high:.3f}"
        grid.add_row(
            row.figure, "" if row.paper is None else f"{row.paper:.4g}", "aborted" if row.ours is None else f"{row.ours:.4g}",
            reach, "" if row.ratio is None else f"{row.ratio:.2f}", str(whys.index(row.why) + 1) if row.why else "",
        )  # fmt: skip
    console.print(grid)
    if whys:
        print("why they differ:")
    for number, why in enumerate(whys, start=1):
        print(f"{number:3}  {why}")
    for line in (*result.notes, *(f"written: {path}" for path in result.files)):
        print(line)
