"""`unskew dashboard`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.commands.common import StoreOption, as_ctrl_c, fail, locate, refuse, store_runs, there

if TYPE_CHECKING:
    from unskew.collector.paths import Store


def dashboard(
    store: StoreOption = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Show a recorded run, of which a rank turned slow and another died.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port on 127.0.0.1.", show_default="8501, or the next free one")
    ] = None,
) -> None:
    """Show the runs of a store in the browser until Ctrl-C."""
    from unskew.dashboard_process import DashboardError, DashboardProcess, is_free

    if demo and store is not None:
        refuse("--demo and --store contradict each other: the recorded run is a store of its own")
    if port is not None and not is_free(port):
        refuse(f"--port {port} is taken: name a free one, or leave --port out for the first free one from 8501")
    as_ctrl_c()
    try:
        with recorded() if demo else nullcontext(there(locate(store))) as place, DashboardProcess(place, port) as process:
            shown, page = ("a recorded run", f"/?run={store_runs(place)[0]}") if demo else (place.root, "")
            print(f"dashboard of {shown}: {process.ready()}{page} (Ctrl-C ends it)", flush=True)
            status = process.wait()
    except KeyboardInterrupt:
        return
    except DashboardError as error:
        fail(str(error))
    fail(f"the dashboard ended with status {status}; its output is in {process.log}")


@contextmanager
def recorded() -> Iterator[Store]:
    """A private copy of the recorded run; it goes with Ctrl-C, and stays, with the dashboard's log in it, after a failure."""
    from unskew.collector.paths import Store
    from unskew.data import DEMO

    copy = Path(tempfile.mkdtemp(prefix="unskew-demo-"))
    try:
        for file in DEMO.rglob("*.*"):
            placed = copy / file.relative_to(DEMO)
            placed.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, placed)
        yield Store(copy)
    except KeyboardInterrupt:
        shutil.rmtree(copy)
        raise
