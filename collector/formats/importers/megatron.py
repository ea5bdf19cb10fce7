"""megatron: the training log of Megatron-LM and its relatives, read by its iteration lines.

``iteration  10/ 500 | consumed samples: 160 | elapsed time per iteration (ms): 1234.5 | ... | lm loss: 1.0E+01 | ...``

The elapsed time is the mean since the previous such line (Megatron's log interval); it belongs to the iteration of its line.
The log of a restarted job may report an iteration twice: these are attempts, of which the last counts. All other lines are
passed over. A number counts only when something follows it, as the last line of a killed job may end within one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from unskew.collector.events import IterationTimed
from unskew.collector.formats.attempts import Attempts
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun
from unskew.collector.formats.text import duration, lines

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):\s*([^\s|/]+)[\s|/]")
_LOSS = re.compile(r"\|\s*lm loss:\s*([^\s|]+)[\s|]")
_BATCH = re.compile(r"\|\s*global batch size:\s*(\d+)[\s|]")
_MICROSECONDS = {"ms": 1e3, "s": 1e6}


def read(path: Path) -> Sequence[ImportedRun]:
    """The run that a log reports. Raises `FormatError` when a line cannot be understood or none is an iteration's."""
    timed: list[IterationTimed] = []
    facts: dict[str, Any] = {}
    attempts = Attempts()
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
    if not timed:
        raise FormatError(f"{path}: no line of this file is 'iteration N/ M | ... elapsed time per iteration ...'")
    iterations = sorted({event.iteration for event in timed})
    facts |= {
        "observed": "iteration times of the job",
        "mean_over_iterations": min((b - a for a, b in pairwise(iterations)), default=1),
        "told_again": attempts.earlier,
    }
    return [ImportedRun(events=timed, ranks=0, iterations=len(iterations), facts=facts, notes=attempts.notes())]


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
