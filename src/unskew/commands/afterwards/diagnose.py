"""`unskew diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import (
    JsonOption,
    StoreOption,
    checking_input,
    locate,
    the_run,
    warn,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from unskew.analytics.core.outcome import Outcome
    from unskew.analytics.diagnosis.diagnose import Diagnosis
    from unskew.collector.events import Diagnosed, Verdict
    from unskew.collector.paths import Store
    from unskew.collector.read.reader import Reader

STREAM = "analysis/diagnose"
SEEN = {
    "chunks": "chunk times",
    "collectives": "collective times only, with the waiting inside",
    "flight recorder": "flight recorders of a job that stood still",
    "iterations": "iteration times only",
    "nothing": "no iteration",
}
SHARED = {"long_sequences", "stage_imbalance", "input_bound", "gc_pause"}
"""Causes whose confidence is the part of the iterations in which they cost enough to be named."""


def diagnose(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Which runs.", show_default="the newest")] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Report what was wrong in a run, who did it, what it cost, and what cannot be said for want of data."""
    from unskew.analytics.diagnosis.diagnose import diagnose as decide
    from unskew.collector.read.reader import open_store
    from unskew.edge.load_run import load_run
    from unskew.terminal.console import SafeConsole

    place = locate(store)
    names = [the_run(place, run) for run in runs or (None,)]
    with checking_input():
        reader = open_store(place)
    with reader:
        warn(reader.problems)
        found = [decide(load_run(reader, run)) for run in names]
        before = [last_diagnosis(reader, run) for run in names]
    for one, last in zip(found, before, strict=True):
        record(place, one, last)
    write_json(json, {"runs": [as_data(one) for one in found]})
    for one in found:
        SafeConsole().print(shown(one))


def judged_at_its_end(place: Store, run: str) -> Outcome | None:
    """The outcome of a run that has just ended, by its diagnosis, which its log has then: the loop saw no account of where the
    time went. None where the log cannot be read, or does not know that the run is over: the caller knows more."""
    from unskew.analytics.core.outcome import Outcome
    from unskew.analytics.diagnosis.diagnose import diagnose as decide
    from unskew.collector.paths import StoreError
    from unskew.collector.read.reader import open_store
    from unskew.edge.load_run import load_run

    try:
        with open_store(place) as reader:
            found, before = decide(load_run(reader, run)), last_diagnosis(reader, run)
    except (StoreError, OSError) as error:
        warn([f"how the run went is said without its diagnosis: {error}"])
        return None
    if found.status == "unfinished":
        return None
    record(place, found, before)
    return Outcome(outcome=found.outcome, smallest_slowdown=found.smallest_slowdown, why=found.why)


def last_diagnosis(reader: Reader, run: str) -> Diagnosed | None:
    """The last diagnosis in the run's log."""
    from unskew.collector.events import Diagnosed
    from unskew.collector.files.tail import decode_event

    query = "select payload::varchar as line from events where run = ? and type like 'diagnosed@%' order by seq desc limit 1"
    lines = reader.sql(query, [run])["line"].to_list()
    event = decode_event(lines[0].encode()) if lines else None
    return event if isinstance(event, Diagnosed) else None


def record(place: Store, one: Diagnosis, before: Diagnosed | None) -> None:
    """Write the diagnosis to the run's log when it is news; a store that cannot be written is no reason to keep the answer."""
    import msgspec

    from unskew.collector.events import Diagnosed
    from unskew.collector.paths import StoreError
    from unskew.collector.write.control_stream import ControlStream

    event = Diagnosed(
        observability=one.observability,
        verdicts=tuple(as_data(one)["verdicts"]),
        time_lost_s=one.time_lost_s,
        abstained=one.abstained,
        outcome=one.outcome,
        smallest_slowdown=one.smallest_slowdown,
        why=one.why,
        status=one.status,
    )
    if before is not None and msgspec.json.encode(event) == msgspec.json.encode(before):
        return
    try:
        stream = ControlStream(place, one.run_id, STREAM, "diagnose")
        stream.add(event)
        stream.close()
    except (StoreError, OSError) as error:
        warn([f"the diagnosis was not written to the log: {error}"])


def as_data(one: Diagnosis) -> dict[str, Any]:
    """The facts as --json has them; verdicts as everywhere."""
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(one)
    for entry, verdict in zip(data["verdicts"], one.verdicts, strict=True):
        entry.pop("type")
        entry["culprits"], entry["victims"] = (msgspec.to_builtins(p) for p in (verdict.culprits, verdict.victims))
        entry["speed"], entry["until_iteration"] = verdict.speed, verdict.until_iteration
    return data


def shown(one: Diagnosis) -> RenderableType:
    """A diagnosis for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from unskew.analytics.core.outcome import percent
    from unskew.analytics.diagnosis.causes import faults
    from unskew.terminal.live_view import OUTCOMES

    count = f"{one.iterations} iteration{'' if one.iterations == 1 else 's'}"
    count += f" (looked at {one.looked_at})" if one.looked_at else ""
    parts: list[RenderableType] = [Text(f"{one.run_id}: {count}, {SEEN[one.observability]}", "bold")]
    table = Table.grid(padding=(0, 2))
    for verdict in one.verdicts:
        table.add_row(Text(verdict.cause, "bold"), Text.assemble(verdict.sentence, (_extent(verdict), "dim")))
        table.add_row("", Text(f"next: {verdict.evidence['next_step']}", "dim"))
    named = one.outcome == "wrong" and bool(faults(one.verdicts))
    parts.append(Text("Something is wrong:" if named else one.sentence, OUTCOMES[one.outcome]))
    if one.verdicts:
        parts.append(table)
        if named and one.smallest_slowdown is not None:
            else_named = f"any other lasting slowdown by {percent(one.smallest_slowdown)} or more would have been named, too"
            parts.append(Text(else_named, "dim"))
        elif named:
            parts.append(Text("whether anything else is slow cannot be told: the log or its noise hides it", "dim"))
    if one.time_lost_s:
        grid = Table(title="Time lost against ideal", title_justify="left", header_style="bold")
        grid.add_column("cause")
        grid.add_column("device-seconds", justify="right")
        for cause, seconds in one.time_lost_s.items():
            grid.add_row(cause, f"{seconds:,.1f}")
        grid.add_row("all", f"{sum(one.time_lost_s.values()):,.1f}", style="bold")
        parts.append(grid)
    silent = Table.grid(padding=(0, 2))
    for sentence in one.abstained:
        silent.add_row(Text("cannot be said", "dim", no_wrap=True), Text(sentence, "dim"))
    return Group(*parts, silent)


def _extent(verdict: Verdict) -> str:
    """How long and how surely; the causes that all ranks share have a part of the iterations instead."""
    if verdict.cause in SHARED:
        return f"  (in {verdict.confidence:.0%} of the iterations)".replace("%", " %")
    until = f", until iteration {verdict.until_iteration}" if verdict.until_iteration is not None else ""
    return f"{until}  (confidence {verdict.confidence:.2f})"
