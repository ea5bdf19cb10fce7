"""`unskew dashboard`."""

from __future__ import annotations

from typing import Annotated

import typer

from unskew.commands.common import StoreOption, fail, locate, refuse, there


def dashboard(
    store: StoreOption = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port on 127.0.0.1.", show_default="8501, or the next free one")
    ] = None,
) -> None:
    """Show the runs of a store in the browser until Ctrl-C."""
    from unskew.dashboard_process import DashboardError, DashboardProcess, is_free

    place = there(locate(store))
    if port is not None and not is_free(port):
        refuse(f"--port {port} is taken: name a free one, or leave --port out for the first free one from 8501")
    try:
        with DashboardProcess(place, port) as process:
            print(f"dashboard of {place.root}: {process.ready()} (Ctrl-C ends it)", flush=True)
            status = process.wait()
    except KeyboardInterrupt:
        return
    except DashboardError as error:
        fail(str(error))
    fail(f"the dashboard ended with status {status}; its output is in {process.log}")
