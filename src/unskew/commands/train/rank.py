"""`unskew rank`: add."""

from __future__ import annotations

from typing import Annotated

import typer

from unskew.commands.common import Commands, StoreOption, known_run, locate
from unskew.commands.train.decide import By, OptionalReason, decide

app = typer.Typer(name="rank", cls=Commands, help="The processes of a run that goes on.", no_args_is_help=True)


@app.callback()
def rank_command() -> None:
    """A group, also with a single command."""


@app.command()
def add(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.")],
    by: By,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, metavar="RANK", help="A lost rank, or the next new one.", show_default="whichever is next"
        ),
    ] = None,
    reason: OptionalReason = "",
    store: StoreOption = None,
) -> None:
    """Start a lost rank again, or a new one; it gets work by the next change of plan while the others train on."""
    from unskew.collector.command import Command

    place = locate(store)
    target = "" if rank is None else str(rank)
    decide(place, Command(kind="rank", run=known_run(place, run), target=target, by=by, reason=reason))
