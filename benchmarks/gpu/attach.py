"""A training of somebody else on a GPU, watched: are its times those of the GPU, is the late rank named, and what does it cost?

One GPU: one rank has it for itself by NCCL, two take turns on it or share it by Gloo (attach_job.py). What a pass takes by
CUDA's events stands beside a clock that waits for the GPU; what the others wait beside what the late one is late.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.workload import work_of
from unskew.analytics.predictor.fit import expected_us, fit
from unskew.benchmarks.attach.overhead import interval
from unskew.benchmarks.attach.probes import CAUSES, EVEN, LENGTHS, LONGER, watched
from unskew.benchmarks.gpu import attach_job
from unskew.benchmarks.gpu.at_hand import gpu_name, no_gpu
from unskew.benchmarks.report import Figure, digits, figure
from unskew.benchmarks.runs import Bench, tried
from unskew.collector.events import DetectionLimit, Event, IterationCommitted, MicroBatchPacked, Span
from unskew.collector.paths import Store
from unskew.runtime.attach.outside.watcher import JobWatcher

LATER = attach_job.LATE_FROM
LATE = (*CAUSES, f"forward@{LATER}", f"backward@{LATER}", f"device@{LATER}")
TOGETHER = tuple(how + case for how in attach_job.TOGETHER for case in ("nothing", "loader"))
OFF_PERCENT, WALL_PERCENT, SOON = 5.0, 1.0, 10
WARM = 8
"""Steps that are not compared: kernels are loaded in them."""
Logs = dict[str, list[Event]]


def figures(bench: Bench) -> Iterator[Figure]:
    """Part by part, each figure on stderr as soon as it is there."""
    if reason := no_gpu():
        yield figure("attach on a GPU", None, "", better="lower", note=reason)
        return
    parts: tuple[tuple[Sequence[str], int, Callable[[Path, Logs], Iterator[Figure]]], ...] = (
        (attach_job.ALONE, 100, _alone), ((*LATE, *EVEN, LONGER), 150, _in_turns), (TOGETHER, 80, _together),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="unskew-gpu-") as folder:
        for cases, limit_s, measure in bench.steps(gpu_name(), parts):
            for one in tried("attach on a GPU", partial(_trained, bench.store, Path(folder), cases, limit_s, measure)):
                value = "not measured" if one.value is None else f"{digits(one.value)} {one.unit}"
                print(f"{time.strftime('%X')} {one.name}: {value}; {one.note}", file=sys.stderr, flush=True)
                yield one


def _trained(
    store: Store, folder: Path, cases: Sequence[str], limit_s: int, measure: Callable[[Path, Logs], Iterator[Figure]]
) -> Iterator[Figure]:
    """What is measured of these cases, which are trained here and now."""
    subprocess.run(
        [sys.executable, attach_job.__file__, str(store.root), str(folder), *cases], check=True, timeout=limit_s
    )  # fmt: skip
    yield from measure(folder, {case: _logged(store, case) for case in cases})


def _logged(store: Store, case: str) -> list[Event]:
    events: list[Event] = []
    watcher = JobWatcher(
        store, attach_job.run_of(case), ["bench"], lambda entry: events.append(entry.event) if entry.event else None
    )
    watcher.finish(0)
    watcher.close()
    return events


def _spans(events: Sequence[Event], kind: str, rank: int = 0) -> list[Span]:
    return [one for one in events if isinstance(one, Span) and one.kind == kind and one.rank == rank and one.iteration >= WARM]


def _own_ms(events: Sequence[Event], kind: str, rank: int = 0) -> float:
    """The median of a kind of work, without waits."""
    return median((span.compute_us or 0) / 1e3 for span in _spans(events, kind, rank))


def _iteration_ms(events: Sequence[Event], rank: int = 0) -> float:
    """In the mean."""
    commits = [one for one in events if isinstance(one, IterationCommitted) and one.rank == rank and one.iteration >= WARM]
    return fmean(one.wall_us / 1e3 for one in commits)


def _waited_ms(events: Sequence[Event], rank: int = 0) -> float:
    """For the others, in the mean of an iteration."""
    spans = [one for one in events if isinstance(one, Span) and one.rank == rank and one.iteration >= WARM]
    waits_us = (span.wall_us if span.kind == "all_reduce" else span.wait_dp_us or 0 for span in spans)
    return sum(waits_us) / 1e3 / len({span.iteration for span in spans})


def _alone(folder: Path, logs: Logs) -> Iterator[Figure]:
    beside = _besides(folder, "alone")
    for kind in ("F", "B"):
        spans = [span for span in _spans(logs["alone"], kind) if span.iteration < attach_job.STEPS]
        own, waited = median(span.wall_us / 1e3 for span in spans), median(beside[kind])
        note = f"{own:.2f} ms by events that nobody waits for, {waited:.2f} ms between two looks at an idle GPU; one rank, NCCL"
        yield figure(f"attach on a GPU: {kind}, how far off", 100 * abs(own / waited - 1), "%", bar=OFF_PERCENT, better="lower",
                     note=note)  # fmt: skip
    yield from _predicted(logs["lengths"])
    yield from _cost(folder)


def _predicted(events: Sequence[Event]) -> Iterator[Figure]:
    """The shipped predictor, on the second half of what was watched."""
    packed = [one for one in events if isinstance(one, MicroBatchPacked)]
    work = {(one.iteration, one.micro_batch): work_of(one.lengths) for one in packed}
    for kind in ("F", "B"):
        spans = [span for span in _spans(events, kind) if (span.iteration, span.micro_batch or 0) in work]
        chunks = [Chunk(0, kind, 1, False, work[span.iteration, span.micro_batch or 0], span.wall_us) for span in spans]
        model, later = fit(chunks[: len(chunks) // 2]).model, chunks[len(chunks) // 2 :]
        off = [(one.work.tokens, 100 * abs(expected_us(model, one) / one.us - 1)) for one in later]
        by_length = {tokens: median(error for of, error in off if of == tokens) for tokens in sorted({of for of, _ in off})}
        note = "; ".join(f"{tokens:,} tokens {error:.1f}" for tokens, error in by_length.items())
        yield figure(f"attach on a GPU: predictor's median error, {kind}", median(error for _, error in off), "%",
                     better="lower", note=f"bf16, fitted to the first half of {len(chunks)} documents; {note}")  # fmt: skip


def _cost(folder: Path) -> Iterator[Figure]:
    found = _besides(folder, "cost")
    pairs, step_ms = list(zip(found["with"], found["without"], strict=True)), median(found["without"])
    percent = [100 * (on - off) / off for on, off in pairs]
    cpu_us = [1e3 * (on - off) for on, off in zip(found["cpu with"], found["cpu without"], strict=True)]
    low, high = interval(percent)
    yield figure(
        "attach on a GPU: wall clock, upper end of the 95 % interval",
        high,
        "%",
        bar=WALL_PERCENT,
        better="lower",
        note=f"of a step of {step_ms:.1f} ms: median {median(percent):.2f} %, from {low:.2f} %; {len(pairs)} turns",
    )
    yield figure("attach on a GPU: CPU a step of one micro-batch", median(cpu_us), "us", better="lower",
                 note="the whole process, the threads that resolve events and write included")  # fmt: skip


def _in_turns(_: Path, logs: Logs) -> Iterator[Figure]:
    jobs = [watched(case, events) for case, events in logs.items()]
    for job in jobs:
        print(f"{job.case}: {sorted(job.named, key=str)}, first at {job.first_at}", file=sys.stderr, flush=True)
    late, rest = [one for one in jobs if one.kind in LATE], [one for one in jobs if one.kind not in LATE]
    missed = [one.case for one in late if not one.right]
    accused = [one.case for one in rest if one.named - {LENGTHS}]
    delays = [one.delay for one in late if one.right]
    where = f"{attach_job.STEPS} steps of two ranks that take turns on one GPU, one seed of"
    yield figure(
        "attach on a GPU: the late rank and its cause, and nothing else",
        len(late) - len(missed),
        "",
        bar=len(late),
        better="higher",
        note=f"{where} {', '.join(LATE)}; not: {', '.join(missed) or 'none'}",
    )
    yield figure(
        "attach on a GPU: iterations until it is named",
        median(delays) if delays else None,
        "",
        bar=SOON,
        better="lower",
        note=f"median; longest {max(delays, default=0)}",
    )
    yield figure("attach on a GPU: jobs in which a healthy rank is accused", len(accused), "", bar=0, better="lower",
                 note=f"{', '.join((*EVEN, LONGER))}; {', '.join(accused) or 'none'}")  # fmt: skip
    longer = _iteration_ms(logs["forward"]) - _iteration_ms(logs["nothing"])
    waits = _waited_ms(logs["forward"]) - _waited_ms(logs["nothing"])
    yield figure("attach on a GPU: a late pass is the other's wait, how far off", 100 * abs(waits / longer - 1), "%",
                 bar=OFF_PERCENT, better="lower",
                 note=f"iterations take {longer:.2f} ms longer, rank 0 waits {waits:.2f} ms longer; its own forward pass takes "
                 f"{_own_ms(logs['nothing'], 'F'):.2f} and {_own_ms(logs['forward'], 'F'):.2f} ms")  # fmt: skip


def _together(_: Path, logs: Logs) -> Iterator[Figure]:
    """Ranks that share a GPU: nobody is judged, and a wait is no work."""
    why = {limit.why for events in logs.values() for limit in events if isinstance(limit, DetectionLimit)}
    named = [case for case, events in logs.items() if watched(case, events).named]
    yield figure("attach on a GPU: jobs that share it in which anybody is named", len(named), "", bar=0, better="lower",
                 note=f"{', '.join(logs)}: {'; '.join(sorted(why))}")  # fmt: skip
    for how in attach_job.TOGETHER:
        calm, late = logs[f"{how}nothing"], logs[f"{how}loader"]
        own = [_own_ms(late, kind) - _own_ms(calm, kind) for kind in ("F", "B")]
        yield figure(f"attach on a GPU: {how.rstrip('-')}, rank 0 waits longer for one whose loader is late",
                     _waited_ms(late) - _waited_ms(calm), "ms", better="higher",
                     note=f"late by {1e3 * attach_job.LATE_S:g} ms; its own passes {own[0]:+.1f} and {own[1]:+.1f} ms, as "
                     "the two compute at another time")  # fmt: skip


def _besides(folder: Path, case: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((folder / f"{case}-0.json").read_text())
    return found
