"""mlperf: the :::MLLOG lines of an MLPerf Training log. One run per file of a folder.

``:::MLLOG {"time_ms": ..., "key": "tracked_stats", "value": {"train_step_time": 5.2, ...}, "metadata": {"step": 12}}``

What a line calls its step is one, or the samples or tokens that were trained on; the log's own batch size, and how many step
times lie between two lines, show which (`unit_of`). A line without is its place among the step times. A line that says a rank
is of that rank. Reports of an iteration that is reported again are attempts, of which the last counts. The mean over a block
between evaluations, whose step is out of line, validation steps, intervals and points in time become `source_recorded`;
single values (batch size, seed, benchmark, status) the run's facts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from unskew.collector.events import IterationTimed, SourceRecorded, Telemetry
from unskew.collector.formats.attempts import Attempts, gone_back, notes_of_gone_back
from unskew.collector.formats.imported import FormatError, ImportedRun, source_files
from unskew.collector.formats.text import (
    CUT,
    cut_notes,
    duration,
    json_line,
    lines,
    microseconds,
    number,
    rank_number,
    whole,
)

_MARK = ":::MLLOG"
_TRAIN = ("train_step_time", "train_step_timing", "train_step_timing in s")
_VALIDATION = ("validation_step_time", "validation_step_timing", "val_step_time")
_LOSS = ("reduced_train_loss", "train_loss", "loss")
_PROGRESS = ("step", "step_num", "samples_count")
NEARLY = 0.9
"""Of the distance between two lines."""


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
    steps: dict[int | None, list[_StepTime]] = defaultdict(list)
    cut: list[int] = []
    for line_number, line in lines(path):
        before, mark, text = line.rpartition(_MARK)  # behind what was cut short another process may go on in the same line
        if not mark:
            continue
        where, entry = f"{path}, line {line_number}", json_line(path, line_number, text)
        if entry is CUT or _MARK in before:
            cut.append(line_number)
        if entry is CUT:
            continue
        if not isinstance(entry, dict) or "key" not in entry or "time_ms" not in entry:
            raise FormatError(f"{where}: a :::MLLOG entry has time_ms, key and value")
        key, value = str(entry["key"]), entry.get("value")
        metadata = entry["metadata"] if isinstance(entry.get("metadata"), dict) else {}
        rank = None if metadata.get("rank") is None else rank_number(where, metadata["rank"])
        progress = next((metadata[field] for field in _PROGRESS if field in metadata), len(steps[rank]))
        event = _event(where, entry, key, progress, rank or 0)
        if isinstance(event, _StepTime):
            steps[rank].append(event)
        else:
            recorded.append(event)
        if isinstance(value, (int, float, str)):
            facts.setdefault(key, value)
        elif key == "run_stop":
            facts["status"] = metadata.get("status")
    if not recorded and not any(steps.values()):
        raise FormatError(f"{path}: no {'whole ' * bool(cut)}line of this file has {_MARK}")
    unit, timed, attempts = StepUnit(), list[IterationTimed](), Attempts()
    back, between = list[tuple[int, int]](), list[tuple[int, int]]()
    for rank, own in steps.items():
        blocks = _block_means(own)
        recorded += [_block(step, rank or 0) for step in own if step.progress in blocks]
        counted = [step for step in own if step.progress not in blocks]
        unit = unit_of(counted, _count(facts, "global_batch_size"), _count(facts, "max_sequence_length"))
        timed += [_timed(step, rank, unit, attempts) for step in counted]
        back += gone_back([step.progress // unit.per_iteration for step in counted])
        between += _restarted_between(counted, unit)
    facts |= {"told_again": attempts.earlier, "went_back": [*back, *between], "step_unit": msgspec.to_builtins(unit)}
    iterations, ranks = len({event.iteration for event in timed}), len({event.rank for event in timed} - {None})
    notes = (*_unit_notes(unit), *attempts.notes(), *notes_of_gone_back(back), *_notes_of_restarts(between), *cut_notes(cut))
    return ImportedRun(name=name, events=[*recorded, *timed], ranks=ranks, iterations=iterations, facts=facts, notes=notes)


def _block(step: _StepTime, rank: int) -> SourceRecorded:
    seconds = step.wall_us / 1e6
    return SourceRecorded(rank=rank, name="mean step time of a block", category="", start_us=step.at_us, value=seconds)


def _timed(step: _StepTime, rank: int | None, unit: StepUnit, attempts: Attempts) -> IterationTimed:
    iteration = step.progress // unit.per_iteration
    return IterationTimed(
        iteration=iteration,
        rank=rank,
        start_us=step.at_us - step.wall_us,
        wall_us=step.wall_us,
        loss=step.loss,
        attempt=attempts.end(iteration, rank),
    )


def _block_means(steps: Sequence[_StepTime]) -> set[int]:
    """The steps that are out of line: after each the log goes on where it was before, as far as it usually does from line to
    line. Where it is the step itself that is so far from the one before, the job was restarted behind it."""
    progress, usual = [step.progress for step in steps], _usual_rise(steps)
    return {
        now
        for before, now, after in zip(progress, progress[1:], progress[2:], strict=False)
        if before < after < now and abs(after - before - usual) <= abs(now - before - usual)
    }


def _restarted_between(steps: Sequence[_StepTime], unit: StepUnit) -> list[tuple[int, int]]:
    """(to, from): where the log goes on from an iteration to one that is nearer than lines are apart, though as many steps have
    had their time as are between two lines: a restarted job, which counts these from `to` on, or from later."""
    usual = _usual_rise(steps)
    least = NEARLY * usual / unit.per_iteration
    return [
        (max(round(b.progress - usual) // unit.per_iteration, 0), a.progress // unit.per_iteration)
        for a, b in pairwise(steps)
        if 0 < b.progress - a.progress < NEARLY * usual and b.at_us - a.at_us >= least * b.wall_us
    ]


def _notes_of_restarts(found: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(
        f"behind iteration {since} a line comes earlier than lines do, and not sooner: a job that was restarted from iteration "
        f"{to} or later, and what it reported from there on before counts as well"
        for to, since in sorted(set(found))
    )


def _usual_rise(steps: Sequence[_StepTime]) -> float:
    """How far it is from line to line."""
    return median([b.progress - a.progress for a, b in pairwise(steps) if b.progress > a.progress] or [0])


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


def _event(where: str, entry: Mapping[str, Any], key: str, progress: object, rank: int) -> _StepTime | SourceRecorded:
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
        return SourceRecorded(rank=rank, name="validation step", category=category, start_us=at_us - wall_us, wall_us=wall_us)
    measured = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return SourceRecorded(rank=rank, name=key, category=category, start_us=at_us, value=measured)


def _wall_us(where: str, step_s: object) -> int:
    seconds = number(where, "the step time", step_s)
    if seconds <= 0:
        raise FormatError(f"{where}: the step time is {seconds:g} s, it must be positive")
    return duration(where, "the step time", seconds, 1e6)


def _first(stats: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((stats[name] for name in names if stats.get(name) is not None), None)
