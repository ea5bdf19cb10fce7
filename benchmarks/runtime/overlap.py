"""Sums of gradients beside the backward pass, over links that cost: how much of them no iteration waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from unskew.analytics.core.plan import SCHEDULES
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun
from unskew.benchmarks.runtime.links import FROM, errors_of, iteration_ms
from unskew.collector.events import CHUNK_KINDS, Span
from unskew.runtime.options import AskedDevice

OPTIONS = msgspec.structs.replace(
    EIGHT_RANKS, pp=2, dp=2, layers=16, dim=32, heads=2, link_us=500, link_mbps=100, mode="observe", iterations=32
)
"""Eight layers a rank, each 7.5 ms backward and, over this link, 5.3 ms to be summed."""


def figures(
    bench: Bench, schedules: Sequence[str] = SCHEDULES, devices: Sequence[AskedDevice] | None = None
) -> Iterator[Figure]:
    """What is hidden, and the live predictor's error, by schedule; with `--full` on the sleeping device, too."""
    chosen: Sequence[AskedDevice] = (("virtual", "sleep") if bench.full else ("virtual",)) if devices is None else devices
    tried = [(device, schedule) for device in chosen for schedule in schedules]
    for device, schedule in bench.steps("sums of gradients beside the backward pass", tried):
        run = bench.run(msgspec.structs.replace(OPTIONS, device=device, schedule=schedule))
        hidden, errors = hidden_of(run), errors_of(run)
        yield figure(
            f"gradients summed beside the backward pass, {device}, {schedule}: hidden",
            100 * median(hidden) if hidden else None, "%", bar=70.0, better="higher",
            note=run.failure or f"{len(hidden)} iterations, {min(hidden, default=0.0):.0%} to {max(hidden, default=0.0):.0%}",
        )  # fmt: skip
        yield figure(
            f"gradients summed beside the backward pass, {device}, {schedule}: median error of the predicted iteration",
            100 * median(errors) if errors else None, "%", bar=3.0, better="lower",
            note=run.failure or f"of {iteration_ms(run):.0f} ms, worst {100 * max(errors, default=0.0):.1f} %",
        )  # fmt: skip


def hidden_of(run: FinishedRun) -> list[float]:
    """Of each iteration from `FROM` on: which part of the sums of the rank that has most of them it did not wait for."""
    found = []
    by_iteration: dict[int, list[Span]] = {}
    for span in run.of(Span):
        if span.iteration is not None and span.iteration >= FROM:
            by_iteration.setdefault(span.iteration, []).append(span)
    for spans in by_iteration.values():
        sums = [span for span in spans if span.kind == "all_reduce"]
        computed_us = max(_end_us(span) for span in spans if span.kind in CHUNK_KINDS)
        came_us: dict[tuple[str | None, int | None], int] = {}
        for span in sums:
            key = span.group, span.first_layer
            came_us[key] = max(came_us.get(key, 0), span.start_us)
        took_us: dict[int, int] = {}
        for span in sums:
            took_us[span.rank] = took_us.get(span.rank, 0) + _end_us(span) - came_us[span.group, span.first_layer]
        if sums:
            found.append(1 - max(max(map(_end_us, sums)) - computed_us, 0) / max(took_us.values()))
    return found


def _end_us(span: Span) -> int:
    return span.start_us + span.wall_us
