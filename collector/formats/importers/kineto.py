"""kineto: PyTorch profiler traces (JSON, also gzip), one file per rank; a folder is the ranks of one run.

An iteration is a ``ProfilerStep#N`` of the thread that trains. What of a step is a piece of work, or waiting, becomes `Span`s
(kineto_spans.py); every kernel, copy and annotation becomes a `SourceRecorded`. Other host operators and launches are not kept:
they are the bulk of a trace and nobody judges a device by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.events import IterationTimed, SourceRecorded, Telemetry
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun, source_files
from unskew.collector.formats.importers.kineto_own import KEY, own_spans
from unskew.collector.formats.importers.kineto_spans import (
    ANNOTATIONS,
    ON_DEVICE,
    STEP,
    Iterations,
    Step,
    TraceEvent,
    spans_of,
)
from unskew.collector.formats.text import MOST_RANKS, content, rank_number, whole


class _Trace(msgspec.Struct):
    events: list[TraceEvent] = msgspec.field(name="traceEvents")
    distributed: dict[str, Any] = msgspec.field(name="distributedInfo", default={})
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default=[])
    our_run: str = msgspec.field(name=KEY, default="")


_decode = msgspec.json.Decoder(_Trace, strict=False).decode
_decode_bare = msgspec.json.Decoder(list[TraceEvent], strict=False).decode


def read(path: Path) -> Sequence[ImportedRun]:
    """The rank files of a folder (or one file) as one run. Raises `FormatError`."""
    files = source_files(path, ".json", ".json.gz", ".trace.gz")
    events: list[Telemetry] = []
    seen: dict[int, Path] = {}
    facts: dict[str, Any] = {}
    steps: set[int] = set()
    for file in files:
        trace = _load(file)
        rank, rank_from = _rank(file, trace, alone=len(files) == 1)
        if rank in seen:
            raise FormatError(f"{file}: {seen[rank].name} is of rank {rank} too, one file per rank is needed")
        seen[rank] = file
        facts.setdefault("rank_from", rank_from)
        facts.setdefault("world_size", trace.distributed.get("world_size"))
        facts.setdefault("device", trace.devices[0].get("name") if trace.devices else None)
        facts |= {"our_run": trace.our_run} if trace.our_run else {}
        own = list(_events(file, rank, trace))
        steps |= {event.iteration for event in own if isinstance(event, IterationTimed)}
        events += own
    return [ImportedRun(events=events, ranks=len(seen), iterations=len(steps), facts=facts)]


def _load(file: Path) -> _Trace:
    """A trace; one that is a bare list of events says nothing of its ranks and devices."""
    raw = content(file)
    try:
        return _Trace(_decode_bare(raw)) if raw.lstrip().startswith(b"[") else _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        where = f", line {raw.count(10, 0, int(at[1])) + 1}" if at else ""
        raise FormatError(f"{file}{where}: not a PyTorch profiler trace ({error})") from error


def _rank(file: Path, trace: _Trace, *, alone: bool) -> tuple[int, str]:
    """The rank of a file, and where it was found."""
    declared = trace.distributed.get("rank")
    if isinstance(declared, int) and not isinstance(declared, bool) and 0 <= declared < MOST_RANKS:
        return declared, "distributedInfo"
    if found := re.search(r"rank[_-]?(\d+)", file.name):
        return rank_number(str(file), float(found[1])), "file name"
    if alone:
        return 0, "nothing: the only file is taken as rank 0"
    raise FormatError(f"{file}: neither its distributedInfo nor its name has the rank")


def _events(file: Path, rank: int, trace: _Trace) -> Iterator[Telemetry]:
    complete = [event for event in trace.events if event.ph == "X" and event.ts is not None]
    for event in complete:
        if abs(event.start) > LARGEST or not 0 <= (event.dur or 0.0) <= LARGEST:
            raise FormatError(f"{file}: event {event.name!r} has ts {event.ts} and dur {event.dur}, which are no microseconds")
    steps = sorted(
        Step(event.start, event.dur or 0.0, whole(str(file), "the number of a ProfilerStep", float(found[1])))
        for event in complete
        if event.cat == "user_annotation" and (found := STEP.fullmatch(str(event.name)))
    )
    if not steps:
        raise FormatError(
            f"{file}: no ProfilerStep#N in it, so its iterations are unknown (profile with a schedule and step())"
        )
    if len({step.number for step in steps}) < len(steps):
        raise FormatError(f"{file}: a ProfilerStep#N occurs in it twice, one profile of one rank is needed")
    for step in steps:
        yield IterationTimed(rank=rank, iteration=step.number, start_us=round(step.start), wall_us=round(step.wall))
    iterations = Iterations(steps, complete)
    for event in complete:
        if event.cat not in ON_DEVICE | ANNOTATIONS or STEP.fullmatch(str(event.name)):
            continue
        yield SourceRecorded(
            rank=rank,
            name=str(event.name),
            category=event.cat,
            start_us=round(event.start),
            iteration=iterations.of(event),
            wall_us=round(event.dur or 0.0),
            track=str(event.tid),
        )
    if trace.our_run:
        yield from own_spans(file, rank, ((event.start, event.args) for event in complete))
    else:
        yield from spans_of(rank, complete, iterations)
