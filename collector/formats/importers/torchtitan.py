"""torchtitan: its structured log, one JSON record a line, one file per rank (``<source>.global_rank_<N>.<time>.jsonl``).

``<name>_start`` and ``<name>_end`` of one task pair last in, first out; an ``_end`` alone has its duration and so its start.
Every span, marker and scalar becomes a `SourceRecorded`; the span ``step`` an iteration's time (what a restarted job executes
again is another attempt); spans whose name is a kind of ours (fetching a batch, optimizer, garbage collection, checkpoint)
also a `Span`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unskew.collector.events import IterationTimed, SourceRecorded, Span, SpanKind, Telemetry
from unskew.collector.formats.attempts import Attempts
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

_KINDS: tuple[tuple[str, SpanKind], ...] = (
    ("fetching_batch", "data_wait"),
    ("gc_collect", "gc"),
    ("optim", "optimizer"),
    ("checkpoint", "checkpoint"),
)
_LOSS = ("loss", "train.loss", "global_avg_loss", "loss_metrics/global_avg_loss")
_TOKENS = ("global_valid_tokens",)


def read(path: Path) -> Sequence[ImportedRun]:
    """The files of a folder (or one file) as one run. Raises `FormatError`."""
    events: list[Telemetry] = []
    ranks: set[int] = set()
    sources: set[str] = set()
    attempts = Attempts()
    iterations: set[int] = set()
    cut: list[str] = []
    for file in source_files(path, ".jsonl"):
        own = _LogFile(file, attempts)
        events += own.events()
        steps = list(own.steps())
        events += steps
        iterations |= {step.iteration for step in steps}
        ranks |= own.ranks
        sources |= own.sources
        cut += [f"{file.name}: {note}" for note in cut_notes(own.cut)]
    if not events:
        raise FormatError(f"{path}: no record in it")
    facts = {"sources": sorted(sources), "told_again": attempts.earlier}
    notes = (*attempts.notes(), *cut)
    return [ImportedRun(events=events, ranks=len(ranks), iterations=len(iterations), facts=facts, notes=notes)]


class _LogFile:
    """One file's records, in order."""

    def __init__(self, path: Path, attempts: Attempts) -> None:
        self.path, self._attempts = path, attempts
        self.ranks: set[int] = set()
        self.sources: set[str] = set()
        self.cut: list[int] = []
        self._open: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._steps: list[tuple[int, int, int, int, int]] = []
        self._scalars: dict[tuple[int | None, int, str], float] = {}

    def events(self) -> Iterator[Telemetry]:
        for line_number, line in lines(self.path):
            record = json_line(self.path, line_number, line) if line.strip() else None
            if record is CUT:
                self.cut.append(line_number)
            elif line.strip():
                yield from self._record(line_number, record)

    def steps(self) -> Iterator[IterationTimed]:
        """The times of the steps, once `events` has been read."""
        for rank, step, attempt, start_us, wall_us in self._steps:
            tokens = self._scalar(step, attempt, _TOKENS)
            yield IterationTimed(
                iteration=step,
                rank=rank,
                start_us=start_us,
                wall_us=wall_us,
                loss=self._scalar(step, attempt, _LOSS),
                tokens=None if tokens is None else int(tokens),
                attempt=attempt,
            )

    def _scalar(self, step: int, attempt: int, names: Sequence[str]) -> float | None:
        return next((self._scalars[step, attempt, name] for name in names if (step, attempt, name) in self._scalars), None)

    def _record(self, line_number: int, record: Any) -> Iterator[Telemetry]:
        where = f"{self.path}, line {line_number}"
        if not isinstance(record, dict) or not isinstance(record.get("log_type_name"), str):
            raise FormatError(f"{where}: a record has log_type_name, time_us and rank")
        name, value = record["log_type_name"], record.get("value")
        event = SourceRecorded(
            rank=rank_number(where, record.get("rank")),
            name=name,
            category=str(record.get("log_type", "")),
            start_us=microseconds(where, "time_us", record.get("time_us"), 1),
            iteration=None if record.get("step") is None else whole(where, "step", record["step"]),
            track=str(record.get("task_name") or ""),
            value=number(where, "value", value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None,
        )
        self.ranks.add(event.rank)
        self.sources.add(str(record.get("source", "")))
        if event.category == "instant":
            yield self._marker(event, record.get("event_name"))
        elif name.endswith("_start"):
            if name == "step_start" and event.iteration is not None:
                self._attempts.begin(event.iteration, event.rank)
            self._open[event.track].append((name.removesuffix("_start"), event.start_us))
        elif name.endswith("_end"):
            yield from self._span(event, duration(where, "value (ms)", value, 1e3))
        else:
            yield event

    def _marker(self, event: SourceRecorded, scalar: object) -> SourceRecorded:
        if event.name != "metric_value" or event.value is None:
            return event
        attempt = 0 if event.iteration is None else self._attempts.of(event.iteration, event.rank)
        self._scalars[event.iteration, attempt, str(scalar)] = event.value
        return replace(event, name=str(scalar))

    def _span(self, end: SourceRecorded, wall_us: int) -> Iterator[Telemetry]:
        name = end.name.removesuffix("_end")
        opened = self._open[end.track]
        # A file may begin in the middle of a span.
        start_us = opened.pop()[1] if opened and opened[-1][0] == name else end.start_us - wall_us
        yield replace(end, name=name, category="span", start_us=start_us, wall_us=wall_us, value=None)
        if end.iteration is None:
            return
        if name == "step":
            self._steps.append((end.rank, end.iteration, self._attempts.end(end.iteration, end.rank), start_us, wall_us))
        kind = next((kind for word, kind in _KINDS if word in name.lower()), None)
        if kind is not None:
            yield Span(
                kind=kind,
                device=str(end.rank),
                rank=end.rank,
                plan_version=0,
                attempt=self._attempts.of(end.iteration, end.rank),
                iteration=end.iteration,
                start_us=start_us,
                wall_us=wall_us,
                group=name,
            )
