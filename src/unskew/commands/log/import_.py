"""`unskew import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unskew.commands.common import (
    JsonOption,
    SharedOption,
    StoreOption,
    checking_input,
    fail,
    locate,
    refuse,
    rights_of_new,
    write_json,
)
from unskew.terminal.safe_text import harmless

SHOWN = 10


def import_(
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="One of straggler-analysis, kineto, torchtitan, megatron, mlperf, flight-recorder, iteration-times.",
            show_default=False,
        ),
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file, or a folder of files.", show_default=False)],
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run.", show_default="the file's, and a hash")
    ] = None,
    json: JsonOption = None,
    store: StoreOption = None,
    shared: SharedOption = False,
) -> None:
    """Bring another tool's trace or log into the store as a run like any other."""
    from unskew.collector.formats.registry import IMPORTERS, bring_in
    from unskew.collector.paths import StoreError, checked_name

    place = locate(store)
    if format not in IMPORTERS:
        refuse(f"FORMAT {format} is not known; known are {', '.join(IMPORTERS)}")
    with checking_input():
        if run is not None:
            checked_name("run", run)
        if shared or place.root.is_dir():  # else none is made before the file is known to be good
            place.enter(mode=rights_of_new(shared))
        try:
            runs = bring_in(place, format, path, run)
        except StoreError as error:
            fail(str(error))
    write_json(json, runs)
    for stored in runs[:SHOWN]:
        if stored.already:
            print(f"run {stored.run}: in the store already, nothing was written")
        else:
            ranks = f"{stored.ranks} rank{'s' * (stored.ranks != 1)}, " if stored.ranks else ""
            print(
                f"run {stored.run}: {ranks}{stored.iterations} iteration{'s' * (stored.iterations != 1)}, "
                f"{stored.events:,} event{'s' * (stored.events != 1)}"
            )
        for note in stored.notes:
            print(f"  {harmless(note)}")
    if len(runs) > SHOWN:
        print(f"and {len(runs) - SHOWN} more runs of {path}")
    print(f"store {place.root}")
    if len(runs) == 1:
        there = f" --store {store}" if store else ""
        print(f"what was wrong in it: unskew diagnose {runs[0].run}{there}; to look at it: unskew dashboard{there}")
