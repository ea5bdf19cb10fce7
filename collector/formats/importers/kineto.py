"""kineto: PyTorch profiler traces (JSON, also gzip), one file per rank; a folder is the ranks of one run.

An iteration is a ``ProfilerStep#N`` of the thread that trains; device work belongs to the iteration in which the host launched
it (the launch has the same `correlation`), else to the one in which it ran. NCCL kernels with a kind of ours become `Span`s;
every kernel, copy and annotation becomes a `SourceRecorded`. Host operators and launches are not kept: they are the bulk of a
trace and nobody judges a device by them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.events import IterationTimed, SourceRecorded, Span, SpanKind, Telemetry
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun, source_files
from unskew.collector.formats.importers.kineto_own import KEY, own_spans
from unskew.collector.formats.text import MOST_RANKS, content, rank_number, whole

_STEP = re.compile(r"ProfilerStep#(\d+)")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
_KINDS: tuple[tuple[str, SpanKind], ...] = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
)
_BYTES = {"Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str | int | float = ""
    ts: float | None = None
    dur: float | None = None
    tid: str | int | None = None
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    distributed: dict[str, Any] = msgspec.field(name="distributedInfo", default={})
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default=[])
    our_run: str = msgspec.field(name=KEY, default="")


_decode = msgspec.json.Decoder(_Trace, strict=False).decode


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
        own = list(_events(file, rank, trace))
        steps |= {event.iteration for event in own if isinstance(event, IterationTimed)}
        events += own
    return [ImportedRun(events=events, ranks=len(seen), iterations=len(steps), facts=facts)]


def _load(file: Path) -> _Trace:
    raw = content(file)
    try:
        return _decode(raw)
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
        if abs(event.ts or 0.0) > LARGEST or not 0 <= (event.dur or 0.0) <= LARGEST:
            raise FormatError(f"{file}: event {event.name!r} has ts {event.ts} and dur {event.dur}, which are no microseconds")
    steps = sorted(
        (event.ts or 0.0, event.dur or 0.0, whole(str(file), "the number of a ProfilerStep", float(found[1])))
        for event in complete
        if event.cat == "user_annotation" and (found := _STEP.fullmatch(str(event.name)))
    )
    if not steps:
        raise FormatError(
            f"{file}: no ProfilerStep#N in it, so its iterations are unknown (profile with a schedule and step())"
        )
    if len({number for _, _, number in steps}) < len(steps):
        raise FormatError(f"{file}: a ProfilerStep#N occurs in it twice, one profile of one rank is needed")
    for start, wall, number in steps:
        yield IterationTimed(rank=rank, iteration=number, start_us=round(start), wall_us=round(wall))
    begins = [start for start, _, _ in steps]
    launched = {_correlation(event): event.ts for event in complete if event.cat in _LAUNCHES}

    def iteration_at(at: float) -> int | None:
        place = bisect_right(begins, at) - 1
        if place < 0 or at > steps[place][0] + steps[place][1]:
            return None
        return steps[place][2]

    for event in complete:
        if event.cat not in _ON_DEVICE | _ANNOTATIONS or _STEP.fullmatch(str(event.name)):
            continue
        ts = event.ts or 0.0
        launch = _correlation(event)
        iteration = iteration_at(ts if launch is None else launched.get(launch) or ts)
        name, start_us, wall_us = str(event.name), round(ts), round(event.dur or 0.0)
        yield SourceRecorded(
            rank=rank,
            name=name,
            category=event.cat,
            start_us=start_us,
            iteration=iteration,
            wall_us=wall_us,
            track=str(event.tid),
        )
        kind = None if trace.our_run else _kind(event)
        if kind is not None and iteration is not None:
            yield Span(
                kind=kind,
                device=str(event.args.get("device", rank)),
                rank=rank,
                plan_version=0,
                attempt=0,
                iteration=iteration,
                start_us=start_us,
                wall_us=wall_us,
                group=None if (group := event.args.get("Process Group Name")) is None else str(group),
                bytes=_bytes(event.args),
                posted_us=start_us,
            )
    if trace.our_run:
        yield from own_spans(file, rank, ((event.ts or 0.0, event.args) for event in complete))


def _correlation(event: _Event) -> int | None:
    number = event.args.get("correlation")
    return number if isinstance(number, int) else None


def _kind(event: _Event) -> SpanKind | None:
    """The kind of an NCCL (or RCCL) kernel; None for other work and for collectives that have none of ours."""
    if event.cat != "kernel" or "ccl" not in str(event.name).lower():
        return None
    name = str(event.args.get("Collective name", event.name)).lower().replace("_", "")
    return next((kind for word, kind in _KINDS if word in name), None)


def _bytes(args: Mapping[str, Any]) -> int | None:
    elements, size = args.get("In msg nelems"), _BYTES.get(str(args.get("dtype")))
    return elements * size if isinstance(elements, int) and size and 0 <= elements <= LARGEST // size else None
