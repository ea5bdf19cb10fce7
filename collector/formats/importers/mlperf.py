"""mlperf: the :::MLLOG lines of an MLPerf Training log. One run per file of a folder.

``:::MLLOG {"time_ms": ..., "key": "tracked_stats", "value": {"train_step_time": 5.2, ...}, "metadata": {"step": 12}}``

What a line calls its step is one, or the samples or tokens that were trained on; the log's own batch size, and how many step
times lie between two lines, show which (`unit_of`). A line without is its place among the step times. Reports of an iteration
that is reported again are attempts, of which the last counts. The mean over a block between evaluations, whose step is out of
line, validation steps, intervals and points in time become `source_recorded`; single values (batch size, seed, benchmark,
status) the run's facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from unskew.collector.events import IterationTimed, SourceRecorded, Telemetry
from unskew.collector.formats.attempts import Attempts
from unskew.collector.formats.imported import FormatError, ImportedRun, source_files
from unskew.collector.formats.text import duration, json_of, lines, microseconds, number, whole

_MARK = ":::MLLOG"
_TRAIN = ("train_step_time", "train_step_timing", "train_step_timing in s")
_VALIDATION = ("validation_step_time", "validation_step_timing", "val_step_time")
_LOSS = ("reduced_train_loss", "train_loss", "loss")
_PROGRESS = ("step", "step_num", "samples_count")


class _StepTime(msgspec.Struct, frozen=True):
    """A line with a step time; `progress`: what it calls its step."""

    at_us: int
    wall_us: int
    loss: float | None
    progress: int


class StepUnit(msgspec.Struct, frozen=True):
    """What a log's steps count, and how many of these an iteration is."""

    counts: str = "iterations"
    per_iteration: int = 1


def read(path: Path) -> Sequence[ImportedRun]:
    """A run per log file. Raises `FormatError` when a line is malformed or a file has no :::MLLOG line."""
    files = source_files(path, ".log", ".txt", ".out")
    return [_run(file, "" if file == path else file.name.partition(".")[0]) for file in files]


def _run(path: Path, name: str) -> ImportedRun:
    recorded: list[Telemetry] = []
    facts: dict[str, Any] = {"observed": "iteration times of the job"}
    steps: list[_StepTime] = []
    for line_number, line in lines(path):
        _, mark, text = line.partition(_MARK)
        if not mark:
            continue
        where, entry = f"{path}, line {line_number}", json_of(path, line_number, text.strip())
        if not isinstance(entry, dict) or "key" not in entry or "time_ms" not in entry:
            raise FormatError(f"{where}: a :::MLLOG entry has time_ms, key and value")
        key, value = str(entry["key"]), entry.get("value")
        metadata = entry["metadata"] if isinstance(entry.get("metadata"), dict) else {}
        progress = next((metadata[field] for field in _PROGRESS if field in metadata), len(steps))
        event = _event(where, entry, key, progress)
        if isinstance(event, _StepTime):
            steps.append(event)
        else:
            recorded.append(event)
        if isinstance(value, (int, float, str)):
            facts.setdefault(key, value)
        elif key == "run_stop":
            facts["status"] = metadata.get("status")
    if not recorded and not steps:
        raise FormatError(f"{path}: no line of this file has {_MARK}")
    blocks = _block_means(steps)
    recorded += [
        SourceRecorded(rank=0, name="mean step time of a block", category="", start_us=step.at_us, value=step.wall_us / 1e6)
        for step in steps
        if step.progress in blocks
    ]
    steps = [step for step in steps if step.progress not in blocks]
    unit, attempts = unit_of(steps, _count(facts, "global_batch_size"), _count(facts, "max_sequence_length")), Attempts()
    timed = [
        IterationTimed(
            iteration=iteration,
            start_us=step.at_us - step.wall_us,
            wall_us=step.wall_us,
            loss=step.loss,
            attempt=attempts.end(iteration),
        )
        for step in steps
        for iteration in [step.progress // unit.per_iteration]
    ]
    facts |= {"told_again": attempts.earlier, "step_unit": msgspec.to_builtins(unit)}
    iterations = len({event.iteration for event in timed})
    notes = (*_unit_notes(unit), *attempts.notes())
    return ImportedRun(name=name, events=[*recorded, *timed], ranks=0, iterations=iterations, facts=facts, notes=notes)


def _block_means(steps: Sequence[_StepTime]) -> set[int]:
    """The steps that are out of line: after each the log goes on where it was before. A restart goes on from further back."""
    progress = [step.progress for step in steps]
    return {now for before, now, after in zip(progress, progress[1:], progress[2:], strict=False) if before < after < now}


def unit_of(steps: Sequence[_StepTime], batch_size: int | None, sequence_length: int | None) -> StepUnit:
    """What the steps count: that of which there are as many between two lines as step times fit between their times.

    The median of the lines decides, as evaluations and restarts lie between some. Samples and tokens go up by whole batches.
    """
    pairs = [(a, b) for a, b in pairwise(steps) if b.progress > a.progress and b.at_us > a.at_us and b.wall_us]
    if not pairs:
        return StepUnit()
    rise = median(b.progress - a.progress for a, b in pairs)
    elapsed = median((b.at_us - a.at_us) / b.wall_us for a, b in pairs)
    divisor = math.gcd(*(b.progress - a.progress for a, b in pairwise(steps)))
    candidates = [StepUnit()]
    if batch_size:
        candidates.append(StepUnit("samples", batch_size))
        candidates += [StepUnit("tokens", batch_size * sequence_length)] if sequence_length else []
    else:
        candidates.append(StepUnit("samples or tokens", divisor))
    whole_batches = [unit for unit in candidates if divisor % unit.per_iteration == 0]
    return min(whole_batches, key=lambda unit: (abs(math.log(rise / unit.per_iteration / elapsed)), unit.per_iteration))


def _unit_notes(unit: StepUnit) -> tuple[str, ...]:
    if unit.per_iteration == 1:
        return ()
    return (f"its steps count {unit.counts}, {unit.per_iteration:,} to an iteration: iterations are numbered by these",)


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    """A fact that is a count of at least one."""
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _event(where: str, entry: Mapping[str, Any], key: str, progress: object) -> _StepTime | SourceRecorded:
    at_us, value = microseconds(where, "time_ms", entry["time_ms"], 1e3), entry.get("value")
    stats: Mapping[str, Any] = value if isinstance(value, dict) else {key: value}
    category = str(entry.get("event_type", ""))
    if (step_s := _first(stats, _TRAIN)) is not None:
        loss = _first(stats, _LOSS)
        return _StepTime(
            at_us,
            _wall_us(where, step_s),
            None if loss is None else number(where, "the loss", loss),
            whole(where, "step", progress, 0),
        )
    if (step_s := _first(stats, _VALIDATION)) is not None:
        wall_us = _wall_us(where, step_s)
        return SourceRecorded(rank=0, name="validation step", category=category, start_us=at_us - wall_us, wall_us=wall_us)
    measured = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return SourceRecorded(rank=0, name=key, category=category, start_us=at_us, value=measured)


def _wall_us(where: str, step_s: object) -> int:
    seconds = number(where, "the step time", step_s)
    if seconds <= 0:
        raise FormatError(f"{where}: the step time is {seconds:g} s, it must be positive")
    return duration(where, "the step time", seconds, 1e6)


def _first(stats: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((stats[name] for name in names if stats.get(name) is not None), None)
