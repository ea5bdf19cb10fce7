"""`unskew probe`: one rank of a run that goes on is measured by itself."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from unskew.commands.common import StoreOption, known_run, locate
from unskew.commands.train.decide import OptionalReason, decide

ANSWER_WITHIN_S = 60.0
"""A probe waits for the end of an iteration."""


def probe(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.")],
    rank: Annotated[int, typer.Option("--rank", min=0, metavar="RANK", help="Which rank.")],
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="NAME", help="Who asks; recorded in the log.", show_default="your user name"),
    ] = None,
    reason: OptionalReason = "",
    store: StoreOption = None,
) -> None:
    """Measure a rank by itself between two iterations: how long it takes for a matrix product."""
    from unskew.collector.command import Command

    place = locate(store)
    asked = Command(kind="probe", run=known_run(place, run), target=str(rank), by=by or getpass.getuser(), reason=reason)
    decide(place, asked, within_s=ANSWER_WITHIN_S)
