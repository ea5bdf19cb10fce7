"""The frame of every benchmark: figures against their bars, on a named machine, as a table and as JSON.

    {"bench", "machine", "command", "figures": [{"name", "value", "unit", "bar", "better", "ok", "note"}]}

One entry per figure that an issue or README states. A figure that misses its bar has `ok` false; it is not an error.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Better = Literal["lower", "higher"]
_Step = TypeVar("_Step")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure. `value` None = could not be measured here (`note` gives the reason); `bar` None = stated without
    a bar."""

    name: str
    value: float | None
    unit: str
    bar: float | None
    better: Better
    ok: bool | None
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    bench: str
    machine: dict[str, str | int]
    command: str
    figures: tuple[Figure, ...]


def figure(name: str, value: float | None, unit: str, *, bar: float | None = None, better: Better, note: str = "") -> Figure:
    """A figure judged against its bar: reaching it exactly is enough.

    >>> figure("regroup", 0.5, "s", bar=0.5, better="lower").ok
    True
    """
    ok = None if value is None or bar is None else (value <= bar if better == "lower" else value >= bar)
    return Figure(name=name, value=value, unit=unit, bar=bar, better=better, ok=ok, note=note)


def machine() -> dict[str, str | int]:
    """What a reader needs to judge a figure: processor, cores, memory, system, versions, date."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unskew": version("unskew"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def shown(progress: Progress, what: str, of: Sequence[_Step], /) -> Iterator[_Step]:
    """Steps with a bar; where there is no terminal, a line when they begin and one when they end."""
    if progress.console.is_terminal:
        yield from progress.track(of, description=what)
        return
    began_s = time.monotonic()
    print(f"{time.strftime('%X')} {what}: {len(of)} step{'s' * (len(of) != 1)}", file=sys.stderr, flush=True)
    yield from of
    print(f"{time.strftime('%X')} {what}: took {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


def bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, refresh_per_second=2)  # what is measured meanwhile shares the cores


def median_ms(work: Callable[[], object], times: int) -> float:
    """Median milliseconds of a call; the first one, which warms up, does not count."""
    work()
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        spent.append(1000.0 * (time.perf_counter() - begun))
    return median(spent)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def publish(bench: str, figures: Sequence[Figure], json_path: Path | None) -> None:
    """Print the table and, when a path is given, write the JSON."""
    command = shlex.join(["unskew", *sys.argv[1:]])
    report = Report(bench=bench, machine=machine(), command=command, figures=tuple(figures))
    Console().print(table(report))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def digits(number: float, n: int = 4) -> str:
    """`number` with `n` digits, or all those before its point."""
    return f"{number:,.0f}" if abs(number) >= 10**n - 0.5 else f"{number:.{n}g}"


def table(report: Report) -> Table:
    """One row per figure."""
    about = ", ".join(str(report.machine[key]) for key in ("processor", "cores", "memory", "date"))
    grid = Table("figure", title=f"{report.bench}: {about.replace(', ', ' · ')}", title_justify="left")
    for column in ("value", "bar"):
        grid.add_column(column, justify="right")
    for column in ("", "note"):
        grid.add_column(column)
    words = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
    for entry in report.figures:
        value = "not measured" if entry.value is None else f"{digits(entry.value)} {entry.unit}"
        bar = "" if entry.bar is None else f"{'≤' if entry.better == 'lower' else '≥'} {digits(entry.bar)} {entry.unit}"
        grid.add_row(entry.name, value, bar, words[entry.ok], entry.note)
    return grid
