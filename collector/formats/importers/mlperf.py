"""mlperf: the :::MLLOG lines of an MLPerf Training log. One run per file of a folder.

``:::MLLOG {"time_ms": ..., "key": "tracked_stats", "value": {"train_step_time": 5.2, ...}, "metadata": {"step": 12}}``

The iteration is the line's `step` where it has one, else its place among the step times; of an iteration that is reported
twice the last report holds. Validation steps, intervals and points in time become `source_recorded`; single values (batch
size, seed, benchmark, status) the run's facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unskew.collector.events import IterationTimed, SourceRecorded, Telemetry
from unskew.collector.formats.imported import FormatError, ImportedRun, source_files
from unskew.collector.formats.text import duration, json_of, lines, microseconds, number, whole

_MARK = ":::MLLOG"
_TRAIN = ("train_step_time", "train_step_timing", "train_step_timing in s")
_VALIDATION = ("validation_step_time", "validation_step_timing", "val_step_time")
_LOSS = ("reduced_train_loss", "train_loss", "loss")


def read(path: Path) -> Sequence[ImportedRun]:
    """A run per log file. Raises `FormatError` when a line is malformed or a file has no :::MLLOG line."""
    files = source_files(path, ".log", ".txt", ".out")
    return [_run(file, "" if file == path else file.name.partition(".")[0]) for file in files]


def _run(path: Path, name: str) -> ImportedRun:
    events: list[Telemetry] = []
    facts: dict[str, Any] = {"observed": "iteration times of the job"}
    timed: dict[int, IterationTimed] = {}
    steps = 0
    for line_number, line in lines(path):
        _, mark, text = line.partition(_MARK)
        if not mark:
            continue
        where, entry = f"{path}, line {line_number}", json_of(path, line_number, text.strip())
        if not isinstance(entry, dict) or "key" not in entry or "time_ms" not in entry:
            raise FormatError(f"{where}: a :::MLLOG entry has time_ms, key and value")
        key, value = str(entry["key"]), entry.get("value")
        metadata = entry["metadata"] if isinstance(entry.get("metadata"), dict) else {}
        event = _event(where, entry, key, metadata.get("step", steps))
        if isinstance(event, IterationTimed):
            steps += 1
            timed[event.iteration] = event
        else:
            events.append(event)
        if isinstance(value, (int, float, str)):
            facts.setdefault(key, value)
        elif key == "run_stop":
            facts["status"] = metadata.get("status")
    if not events and not timed:
        raise FormatError(f"{path}: no line of this file has {_MARK}")
    facts["told_again"] = steps - len(timed)
    return ImportedRun(name=name, events=[*events, *timed.values()], ranks=0, iterations=len(timed), facts=facts)


def _event(where: str, entry: Mapping[str, Any], key: str, step: object) -> IterationTimed | SourceRecorded:
    at_us, value = microseconds(where, "time_ms", entry["time_ms"], 1e3), entry.get("value")
    stats: Mapping[str, Any] = value if isinstance(value, dict) else {key: value}
    category = str(entry.get("event_type", ""))
    if (step_s := _first(stats, _TRAIN)) is not None:
        wall_us, loss = _wall_us(where, step_s), _first(stats, _LOSS)
        return IterationTimed(
            iteration=whole(where, "step", step, 0),
            start_us=at_us - wall_us,
            wall_us=wall_us,
            loss=None if loss is None else number(where, "the loss", loss),
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
