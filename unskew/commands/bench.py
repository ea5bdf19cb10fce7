"""`unskew bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from unskew.commands.common import JsonOption, refuse


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark, such as loop.", show_default=False)],
    json: JsonOption = None,
) -> None:
    """Measure the figures that README states, each against its bar; a missed bar is reported, not an error."""
    from unskew.benchmarks import report

    benches = report.benches()
    if name not in benches:
        refuse(f"there is no benchmark {name!r}, allowed: {', '.join(sorted(benches)) or 'none is installed'}")
    benches[name](json)
