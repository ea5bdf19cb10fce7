"""`unskew store`: check, rebuild, compact, prune, duckdb."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.commands.common import (
    Commands,
    JsonOption,
    StoreOption,
    fail,
    known_run,
    locate,
    refuse,
    there,
    warn,
    write_json,
)
from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    from unskew.collector.paths import Store

app = typer.Typer(
    name="store",
    cls=Commands,
    help="Verify a store, make anew what is made of its log, merge its files, drop old telemetry, copy it to one file. "
    "Runs may go on meanwhile.",
    no_args_is_help=True,
)
_DAY_US = 86_400_000_000


@app.command()
def check(
    mend: Annotated[bool, typer.Option(help="Mend what is made of the log: store.duckdb and projections.")] = True,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Verify everything that could change an answer; mend what can be mended and name the rest (exit 1)."""
    place = locate(store)
    with _maintaining(place):
        from unskew.collector.service.check import check as verify

        checked = verify(place, mend=mend)
    print(
        f"{place.root}: {checked.events:,} events, {checked.sealed_files} sealed, {checked.spool_files} spool and "
        f"{checked.published_files} published files"
    )
    if checked.unchecked_lines:
        print(f"{checked.unchecked_lines:,} lines were written before flushes had checksums: damage in them may go unnoticed")
    for finding in checked.findings:
        print(f"{'mended' if finding.mended else 'found'}: {harmless(finding.sentence)}")
    write_json(json, {"store": str(place.root), "well": checked.well, **{name: getattr(checked, name) for name in _FACTS}})
    if not checked.well:
        fail("the store is not as it was written, or not whole; what is named above cannot be mended from the store itself")
    if not (checked.events or checked.sealed_files or checked.spool_files):
        print("the store is empty: it holds the log of no run")
    else:
        print("every file and every event is as it was written")


_FACTS = ("events", "sealed_files", "spool_files", "published_files", "unchecked_lines", "findings")


@app.command()
def rebuild(json: JsonOption = None, store: StoreOption = None) -> None:
    """Make the database and the projections anew, and prove that every view answers as before."""
    place = locate(store)
    with _maintaining(place):
        from unskew.collector.service.rebuild import rebuild as make_anew

        rebuilt = make_anew(place)
    write_json(json, {"store": str(place.root), "different": rebuilt.different, "views": rebuilt.after})
    if rebuilt.different:
        fail(f"these views do not answer as before: {', '.join(rebuilt.different)}")
    rows = sum(count for count, _ in rebuilt.after.values())
    print(f"{place.root}: database and projections made anew; {len(rebuilt.after)} views, {rows:,} rows, all as before")


@app.command()
def compact(json: JsonOption = None, store: StoreOption = None) -> None:
    """Merge small sealed files of runs that are over."""
    place = locate(store)
    with _maintaining(place):
        from unskew.collector.service.collecting import compact_all

        before, after = compact_all(place)
    write_json(json, {"store": str(place.root), "files_before": before, "files_after": after})
    print(f"{place.root}: {before} sealed files before, {after} now")


@app.command()
def prune(
    telemetry_days: Annotated[
        float,
        typer.Option(
            min=0.0, max=100_000.0, help="Drop telemetry older than this; control events stay for ever.", show_default=False
        ),
    ],
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Drop old telemetry, whole sealed files at a time. What was published of it (rollups) stays."""
    place = locate(store)
    with _maintaining(place):
        from unskew.collector.service.collecting import prune_older

        pruned = prune_older(place, int(time.time() * 1e6 - telemetry_days * _DAY_US))
    rows, size_bytes = sum(one.rows for one in pruned), sum(one.bytes for one in pruned)
    write_json(json, {"store": str(place.root), "files": len(pruned), "events": rows, "bytes": size_bytes})
    print(f"{place.root}: {len(pruned)} files with {rows:,} events dropped, {size_bytes / 1e6:,.1f} MB")


@app.command("duckdb")
def copy(
    out: Annotated[Path, typer.Argument(metavar="OUT.duckdb", help="The file to write.", show_default=False)],
    run: Annotated[str | None, typer.Option(help="This run alone.", show_default="all of them")] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Write one DuckDB file that holds every row itself, with every view: it opens anywhere, unlike store.duckdb."""
    import duckdb

    from unskew.collector.paths import StoreError
    from unskew.collector.read.copy import write_copy
    from unskew.collector.read.reader import open_store

    place = there(locate(store))
    if run is not None:
        known_run(place, run)
    if out.resolve().is_relative_to(place.root.resolve()):
        refuse(f"{out} lies in the store, where a name may be taken for one of its own files: name a file elsewhere")
    if out.exists():
        refuse(f"{out} exists: name a file that does not")
    if not out.absolute().parent.is_dir():
        refuse(f"{out}: there is no folder {out.absolute().parent}")
    try:
        with open_store(place) as reader:
            warn(reader.problems)
            rows = write_copy(reader, out, run)
    except StoreError as error:
        refuse(str(error))
    except (duckdb.Error, OSError) as error:
        fail(f"cannot write {out}: {str(error).partition(chr(10))[0]}")
    size_bytes = out.stat().st_size
    write_json(json, {"store": str(place.root), "run_id": run, "out": str(out), "events": rows, "bytes": size_bytes})
    print(f"{out}: {rows:,} events of {run or 'all runs'}, {size_bytes / 1e6:,.1f} MB; duckdb {out} opens it")


@contextmanager
def _maintaining(store: Store) -> Iterator[None]:
    """Be the store's one writer; a store that cannot be worked on, and work that fails, end the command with one sentence."""
    import duckdb

    from unskew.collector.files.damage import damage
    from unskew.collector.paths import StoreError
    from unskew.collector.service.maintenance import maintaining

    there(store).enter()
    try:
        with maintaining(store):
            yield
    except (StoreError, OSError, duckdb.Error) as error:
        found = damage(error) or error
        sentence = str(found).partition("\n")[0]
        if isinstance(found, StoreError):
            refuse(sentence)
        fail(f"{error.filename or store.root}: {error.strerror or sentence}" if isinstance(error, OSError) else sentence)
