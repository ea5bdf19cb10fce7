"""megatron: the training log of Megatron-LM and its relatives, read by its iteration lines and by what its timers log of ranks.

``iteration  10/ 500 | consumed samples: 160 | elapsed time per iteration (ms): 1234.5 | ... | lm loss: 1.0E+01 | ...``

The elapsed time is the mean since the previous such line (Megatron's log interval); it belongs to the iteration of its line.
The log of a restarted job may report an iteration twice: these are attempts, of which the last counts. All other lines are
passed over. A number counts only when something follows it, as the last line of a killed job may end within one.

With ``--timing-log-level 2 --timing-log-option all`` the timers of every rank follow each iteration's line, the mean per
iteration as well (`_MegatronTimers`); they become a `Span` per rank and kind of work, laid one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from unskew.collector.events import IterationTimed, SpanKind, Telemetry
from unskew.collector.formats.attempts import Attempts
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun
from unskew.collector.formats.parts import spans_of
from unskew.collector.formats.text import duration, lines, rank_number

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):\s*([^\s|/]+)[\s|/]")
_LOSS = re.compile(r"\|\s*lm loss:\s*([^\s|]+)[\s|]")
_BATCH = re.compile(r"\|\s*global batch size:\s*(\d+)[\s|]")
_MICROSECONDS = {"ms": 1e3, "s": 1e6}

_TIMERS = re.compile(r"\btimes across ranks \(ms\):\s*$")
_PREFIX = r"^(?:\[\S+\]:)?\s+"  # torchrun writes which rank prints
_NAME = re.compile(_PREFIX + r"([a-z][a-z-]*):\s*$")
_OF_RANK = re.compile(_PREFIX + r"rank +(\d+): (\d+\.\d+)\n")
_ARGUMENT = re.compile(_PREFIX + r"([a-z_]+) \.{3,} (\S+)\s*$")
LOADING, FORWARD, BACKWARD = "batch-generator", "forward-compute", "backward-compute"
_KINDS: dict[str, SpanKind] = {
    LOADING: "data_wait", FORWARD: "F", BACKWARD: "B", "all-grads-sync": "all_reduce", "grads-all-reduce": "all_reduce",
    "grads-reduce-scatter": "reduce_scatter", "params-all-gather": "all_gather", "optimizer": "optimizer",
}  # fmt: skip
"""Timers -> what they time, in the order of a step; others lie within these, or are messages between stages."""
_SHARING = {"tensor_model_parallel_size": "tensor", "context_parallel_size": "context", "expert_model_parallel_size": "expert"}


def read(path: Path) -> Sequence[ImportedRun]:
    """The run that a log reports. Raises `FormatError` when a line cannot be understood or none is an iteration's."""
    timed: list[IterationTimed] = []
    facts: dict[str, Any] = {}
    attempts, timers = Attempts(), _MegatronTimers(path)
    for at, line in lines(path):
        if found := _ITERATION.search(line):
            if not (elapsed := _ELAPSED.search(line)):
                raise FormatError(f"{path}, line {at}: an iteration without 'elapsed time per iteration'")
            iteration = _count(path, at, "the iteration", found[1])
            facts["iterations_planned"] = _count(path, at, "the last iteration", found[2])
            loss, batch = _LOSS.search(line), _BATCH.search(line)
            timed.append(
                IterationTimed(
                    iteration=iteration,
                    wall_us=_wall_us(path, at, elapsed[1], elapsed[2]),
                    loss=_number(path, at, "the loss", loss[1]) if loss else None,
                    sequences=_count(path, at, "the batch size", batch[1]) if batch else None,
                    attempt=attempts.end(iteration),
                )
            )
        else:
            timers.line(at, line, len(timed) - 1)
    if not timed:
        raise FormatError(f"{path}: no line of this file is 'iteration N/ M | ... elapsed time per iteration ...'")
    iterations = sorted({event.iteration for event in timed})
    facts |= {
        "observed": f"iteration times of the job{', timers of its ranks' if timers.ranks else ''}",
        "mean_over_iterations": min((b - a for a, b in pairwise(iterations)), default=1),
        "told_again": attempts.earlier,
    }
    notes = (*attempts.notes(), *timers.notes())
    ranks, events = timers.ranks, timers.events(timed)
    return [ImportedRun(events=events, ranks=ranks, iterations=len(iterations), facts=facts, notes=notes)]


class _MegatronTimers:
    """What ranks' timers show of their own work: not where a timer holds a wait for others, nor where it is not known whether
    it does, because the log lacks the arguments that the job was started with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arguments: dict[str, str] = {}
        self._timer: str | None = None
        self._ms: dict[int, dict[int, dict[str, float]]] = {}
        """Number of the iteration's line -> rank -> timer -> ms."""

    def line(self, at: int, line: str, number: int) -> None:
        """The next line, which is no iteration's; `number` of the last that was one, -1 = none was."""
        if found := _ARGUMENT.search(line):
            self._arguments[found[1]] = found[2]
        elif _TIMERS.search(line):
            self._timer = ""
        elif self._timer is None:
            return
        elif found := _NAME.search(line):
            self._timer = found[1]
        elif found := _OF_RANK.search(line):
            where = f"{self._path}, line {at}"
            rank, ms = rank_number(where, int(found[1])), duration(where, "the time", float(found[2]), 1e3) / 1e3
            if self._timer in _KINDS and number >= 0:
                self._ms.setdefault(number, {}).setdefault(rank, {})[self._timer] = ms
        else:
            self._timer = None

    @property
    def ranks(self) -> int:
        """How many there are times of."""
        return len({rank for of in self._ms.values() for rank in of})

    def events(self, timed: Sequence[IterationTimed]) -> Iterator[Telemetry]:
        """The iterations, each with the spans of its ranks."""
        why_not, begin_us = self._why_not(), 0
        for number, one in enumerate(timed):
            yield one
            for rank, timers in sorted(self._ms.get(number, {}).items()):
                of = dict(timers)
                if FORWARD in of:  # the batch is fetched within it
                    of[FORWARD] = max(of[FORWARD] - of.get(LOADING, 0.0), 0.0)
                parts = [(kind, round(1e3 * of[name])) for name, kind in _KINDS.items() if name in of and name not in why_not]
                yield from spans_of(one, rank, begin_us, parts, stage=self._stage(rank))
            begin_us += one.wall_us

    def notes(self) -> tuple[str, ...]:
        """Which timers are not read, and why."""
        return tuple(f"{name} of the ranks is left out: {why}" for name, why in self._why_not().items()) if self._ms else ()

    def _stage(self, rank: int) -> int:
        """Of a rank, where nothing but stages and replicas divides them: stages are the outermost in Megatron's order."""
        stages = max(self._size("pipeline_model_parallel_size"), 1)
        if self._arguments.get("use_tp_pp_dp_mapping") == "True":
            return rank % stages
        return rank * stages // max(self._size("world_size"), self.ranks)

    def _size(self, argument: str) -> int:
        text = self._arguments.get(argument, "")
        return int(text) if text.isdecimal() and len(text) < len(str(LARGEST)) else 0

    def _why_not(self) -> dict[str, str]:
        if self._size("world_size") < self.ranks or not self._size("pipeline_model_parallel_size"):
            why = "the log has no arguments of the job (world_size, ...), so it may hold waiting for other ranks"
            return {FORWARD: why, BACKWARD: why}
        shared = [name for argument, name in _SHARING.items() if self._size(argument) > 1]
        if shared:
            why = f"ranks of one {shared[0]}-parallel group wait for each other within it"
            return {FORWARD: why, BACKWARD: why}
        if self._arguments.get("overlap_grad_reduce") == "True":
            return {BACKWARD: "gradients are reduced within it (overlap_grad_reduce)"}
        return {}


def _number(path: Path, line: int, what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FormatError(f"{path}, line {line}: {what} is {text!r}, a number is needed") from None


def _count(path: Path, line: int, what: str, digits: str) -> int:
    if len(digits) > len(str(LARGEST)) or int(digits) > LARGEST:
        raise FormatError(f"{path}, line {line}: {what} is {digits[:40]}, a number up to 2^53 is needed")
    return int(digits)


def _wall_us(path: Path, line: int, unit: str, text: str) -> int:
    elapsed = _number(path, line, "the elapsed time", text)
    return duration(f"{path}, line {line}", "the elapsed time", elapsed, _MICROSECONDS[unit])
