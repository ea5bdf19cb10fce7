"""The spans in one rank's profiler trace: waiting for input, forward and backward passes, collectives, the optimizer.

On a GPU the host only launches: collectives are its NCCL (or RCCL) kernels, where none was recorded the annotations `nccl:*` of
the device. On cores the host works itself, so its annotations are the work:

* ``enumerate(DataLoader)...``: waiting for input (on a GPU too: it is the host that waits);
* ``DistributedDataParallel.forward``: a forward pass, from where the broadcast of buffers before it has ended;
* from the first to the last operation of autograd between two forward passes: a backward pass, without what DDP waits for after
  it. Waiting inside of it (all-reduces that a module does in its backward) counts as its own;
* ``gloo:*``: a collective, from where this rank joins it until all have; ``Optimizer.step#...``: the optimizer.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from unskew.collector.events import Span, SpanKind
from unskew.collector.formats.imported import LARGEST

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVES: tuple[tuple[str, SpanKind], ...] = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
)
_INPUT, _OPTIMIZER, _AUTOGRAD = "enumerate(DataLoader)", "Optimizer.step#", "autograd::engine::evaluate_function"
_FORWARD = frozenset({"DistributedDataParallel.forward", "FullyShardedDataParallel.forward"})
_BACKEND = re.compile(r"(gloo|nccl|mpi|ucc):\w+")
_BYTES = {"Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


class TraceEvent(msgspec.Struct, gc=False):
    """An event of Chrome's trace format; times are microseconds."""

    ph: str = ""
    cat: str = ""
    name: str | int | float = ""
    ts: float | None = None
    dur: float | None = None
    pid: str | int | None = None
    tid: str | int | None = None
    args: dict[str, Any] = {}

    @property
    def start(self) -> float:
        return self.ts or 0.0

    @property
    def end(self) -> float:
        return self.start + (self.dur or 0.0)


class Step(NamedTuple):
    """A ``ProfilerStep#N``: one iteration."""

    start: float
    wall: float
    number: int


class Iterations:
    """To which iteration an event belongs: device work to the one in which the host launched it."""

    def __init__(self, steps: Sequence[Step], events: Sequence[TraceEvent]) -> None:
        self._steps, self._begins = steps, [step.start for step in steps]
        self._launched = {_correlation(event): event.start for event in events if event.cat in LAUNCHES}

    def of(self, event: TraceEvent) -> int | None:
        launch = _correlation(event)
        at = event.start if launch is None else self._launched.get(launch) or event.start
        place = bisect_right(self._begins, at) - 1
        if place < 0 or at > self._steps[place].start + self._steps[place].wall:
            return None
        return self._steps[place].number


def _works_on_cores(events: Sequence[TraceEvent]) -> bool:
    """Whether nothing ran on a device beside the host."""
    return not any(event.cat in ON_DEVICE for event in events)


def spans_of(rank: int, events: Sequence[TraceEvent], iterations: Iterations) -> Iterator[Span]:
    """The spans of one rank."""
    cores = _works_on_cores(events)
    for event in _collectives(events):
        kind = _collective(event)
        if kind is not None and (iteration := iterations.of(event)) is not None:
            yield _span(kind, rank, iteration, start=event.start, end=event.end, collective=event)
    for event in events:
        kind = _of_host(str(event.name)) if event.cat == "user_annotation" else None
        if kind is not None and (cores or kind == "data_wait") and (iteration := iterations.of(event)) is not None:
            yield _span(kind, rank, iteration, start=event.start, end=event.end)
    if cores:
        yield from _passes(rank, events, iterations)


def _of_host(name: str) -> SpanKind | None:
    if name.startswith(_INPUT):
        return "data_wait"
    return "optimizer" if name.startswith(_OPTIMIZER) else None


def _passes(rank: int, events: Sequence[TraceEvent], iterations: Iterations) -> Iterator[Span]:
    """The forward passes of each iteration, numbered, and the backward pass behind each."""
    by_iteration: dict[int, tuple[list[TraceEvent], list[TraceEvent]]] = {}
    for event in sorted(events, key=lambda one: one.start):
        begins = str(event.name) in _FORWARD
        if (begins or str(event.name).startswith(_AUTOGRAD)) and (iteration := iterations.of(event)) is not None:
            by_iteration.setdefault(iteration, ([], []))[not begins].append(event)
    waits = sorted((event for event in events if _BACKEND.fullmatch(str(event.name))), key=lambda one: one.start)
    for iteration, (forwards, autograd) in by_iteration.items():
        borders = [*(event.start for event in forwards), float("inf")]
        for number, (forward, (_, end)) in enumerate(zip(forwards, pairwise(borders), strict=True)):
            within = waits[_first_from(forward.start, waits) : _first_from(forward.end, waits)]
            waited = max((one.end for one in within if one.end <= forward.end), default=forward.start)
            yield _span("F", rank, iteration, start=waited, end=forward.end, micro_batch=number)
            behind = autograd[_first_from(forward.end, autograd) : _first_from(end, autograd)]
            if behind:
                yield _span("B", rank, iteration, start=behind[0].start, end=max(one.end for one in behind), micro_batch=number)


def _first_from(us: float, events: Sequence[TraceEvent]) -> int:
    """The place of the first event, of those sorted by their start, that begins at `us` or later."""
    return bisect_left(events, us, key=lambda event: event.start)


def _span(
    kind: SpanKind,
    rank: int,
    iteration: int,
    *,
    start: float,
    end: float,
    collective: TraceEvent | None = None,
    micro_batch: int | None = None,
) -> Span:
    args: Mapping[str, Any] = collective.args if collective is not None else {}
    start_us = round(start)
    return Span(
        kind=kind,
        device=str(args.get("device", rank)),
        rank=rank,
        plan_version=0,
        attempt=0,
        iteration=iteration,
        start_us=start_us,
        wall_us=max(round(end - start), 0),
        micro_batch=micro_batch,
        group=None if (group := args.get("Process Group Name")) is None else str(group),
        bytes=_bytes(args),
        posted_us=None if collective is None else start_us,
    )


def _collectives(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Kernels where they were recorded, else annotations of the device, else of the host; Gloo has only those."""
    named = [event for event in events if event.cat in ANNOTATIONS and _BACKEND.fullmatch(str(event.name))]
    sources = (
        [event for event in events if event.cat == "kernel" and "ccl" in str(event.name).lower()],
        [event for event in named if event.cat == "gpu_user_annotation"],
        [event for event in named if not str(event.name).startswith("gloo:")],
    )
    device = next((source for source in sources if source), [])
    return [*device, *(event for event in named if str(event.name).startswith("gloo:"))]


def _collective(event: TraceEvent) -> SpanKind | None:
    """The kind of a collective; None for those that have none of ours."""
    name = str(event.args.get("Collective name", event.name)).lower().replace("_", "")
    return next((kind for word, kind in _COLLECTIVES if word in name), None)


def _correlation(event: TraceEvent) -> int | None:
    number = event.args.get("correlation")
    return number if isinstance(number, int) else None


def _bytes(args: Mapping[str, Any]) -> int | None:
    elements, size = args.get("In msg nelems"), _BYTES.get(str(args.get("dtype")))
    return elements * size if isinstance(elements, int) and size and 0 <= elements <= LARGEST // size else None
