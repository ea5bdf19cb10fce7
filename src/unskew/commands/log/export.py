"""`unskew export`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.commands.common import (
    JsonOption,
    StoreOption,
    checking_input,
    fail,
    locate,
    refuse,
    the_run,
    warn,
    write_json,
)

if TYPE_CHECKING:
    from unskew.collector.paths import Store


def export(
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="One of straggler-analysis, kineto, perfetto, otlp, parquet, prometheus.", show_default=False
        ),
    ],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Which run.", show_default="the newest")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="The file (kineto, parquet: the folder) to write; - = stdout.")
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve", metavar="PORT", min=0, max=65535, help="prometheus: answer scrapes on 127.0.0.1:PORT (0 = a free one)."
        ),
    ] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Write a run in another tool's format."""
    from unskew.collector.files import manifest
    from unskew.collector.formats.registry import EXPORTERS, take_out

    place = locate(store)
    if format not in EXPORTERS:
        refuse(f"FORMAT {format} is not known; known are {', '.join(EXPORTERS)}")
    run = the_run(place, run)
    warn(manifest.load(place).problems)
    if serve is not None:
        if format != "prometheus" or out is not None:
            refuse("--serve PORT goes with prometheus, and instead of --out")
        answer_scrapes(place, run, serve)
        return
    if out is None:
        refuse("--out PATH is needed: the file to write" + (", or --serve PORT" if format == "prometheus" else ""))
    if str(out) == "-":
        print_out(place, format, run)
        return
    if not out.absolute().parent.is_dir():
        refuse(f"--out {out}: there is no folder {out.absolute().parent}")
    with checking_input():
        try:
            what = take_out(place, format, run, out)
        except OSError as error:
            fail(f"cannot write {out}: {error.strerror or error}")
    write_json(json, {"run_id": run, "format": format, "out": str(out), "what": what})
    print(f"run {run} to {out}: {what}")


def print_out(place: Store, format: str, run: str) -> None:
    """The run's form to stdout."""
    from unskew.collector.formats.registry import FOLDERS, take_out

    if format in FOLDERS:
        refuse(f"--out -: {format} is a folder of files, name one that does not exist")
    with tempfile.TemporaryDirectory(prefix="unskew-export-") as folder, checking_input():
        file = Path(folder) / "out"
        take_out(place, format, run, file)
        with file.open("rb") as written:
            shutil.copyfileobj(written, sys.stdout.buffer)


def answer_scrapes(place: Store, run: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM, also where a shell started this in the background and has Ctrl-C ignored."""
    import signal

    from unskew.collector.formats.exporters import prometheus
    from unskew.collector.read.reader import open_store

    def ready(chosen: int) -> None:
        print(f"run {run} at http://127.0.0.1:{chosen}/metrics until Ctrl-C", flush=True)

    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    with open_store(place) as reader, suppress(KeyboardInterrupt):
        try:
            prometheus.serve(reader, run, port, ready)
        except OSError as error:
            fail(f"cannot serve on 127.0.0.1:{port}: {error.strerror or error}")
