"""`unskew watch`."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from unskew.commands.common import StoreOption, known_run, locate, newest_run, refuse, warn

POLL_S = 0.5


def watch(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Which run.", show_default="the newest")] = None,
    store: StoreOption = None,
) -> None:
    """Show a run as it goes, until it ends or Ctrl-C; an ended run is shown as it ended."""
    from rich.console import Console

    from unskew.collector.write.commands import controller_alive
    from unskew.terminal.follow import LogFollower
    from unskew.terminal.live import Screen

    place = locate(store)
    name = newest_run(place) if run is None else known_run(place, run)
    if name is None:
        refuse(f"there is no run in {place.root} yet: start one with `unskew run`")
    with (
        LogFollower(place, name) as follow,
        Screen(Console(), [("store", str(place.root))]) as screen,
        suppress(KeyboardInterrupt),
    ):
        alive = True
        while alive:
            alive = controller_alive(place, name)
            for entry in follow.poll():
                screen.feed(entry)
            screen.controlled(alive)
            screen.tick()
            time.sleep(POLL_S if alive else 0.0)
    if not alive and screen.state.run.finished is None:
        warn([f"the controller of run {name} is gone: the run ended without saying so"])
    warn(follow.problems)
