"""`unskew bench`."""

from __future__ import annotations

import tempfile
from typing import Annotated

import typer

from unskew.commands.common import JsonOption, checking_input, locate, refuse


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark; an unknown name lists them all.", show_default=False)],
    full: Annotated[bool, typer.Option("--full", help="All seeds and the whole soak, however long it takes.")] = False,
    part: Annotated[
        str | None, typer.Option("--part", metavar="NAME", help="Measure this part of it alone.", show_default="all of them")
    ] = None,
    json: JsonOption = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="DIR", help="Where a benchmark's runs are kept.", show_default="nowhere"),
    ] = None,
) -> None:
    """Measure the figures that README states, each against its bar; a missed bar is reported, not an error."""
    try:
        from unskew.benchmarks import registry
    except ModuleNotFoundError as error:
        if error.name != "unskew.benchmarks":
            raise
        refuse("benches are not installed: run them from a checkout of the repository, with make bench")
    if name not in registry.BENCHES:
        refuse(f"there is no benchmark {name!r}, allowed: {', '.join(sorted(registry.BENCHES))}")
    if part is not None and part not in registry.part_names(name):
        refuse(f"--part {part!r} is no part of {name}, allowed: {', '.join(sorted(registry.part_names(name)))}")
    from unskew.benchmarks import runs

    # A collector that is leaving may write while the folder is removed: the figures are there all the same.
    with tempfile.TemporaryDirectory(prefix="unskew-bench-", ignore_cleanup_errors=True) as folder:
        place = locate(store or folder)
        with checking_input():
            place.enter()
        runs.perform(name, registry.parts_of(name, part), json, place, full=full)
