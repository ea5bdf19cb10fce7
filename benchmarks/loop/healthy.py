"""Nothing is wrong, and documents are of uneven lengths: is anybody flagged?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, TWO_RANKS, Bench, done
from unskew.collector.events import MicroBatchPacked, PlanApplied, Verdict
from unskew.runtime.options import RunOptions

ITERATIONS = 200
SLEEPING = msgspec.structs.replace(EIGHT_RANKS, device="sleep", micro_batches=4)
CASES = (
    *(msgspec.structs.replace(SLEEPING, seed=seed, profile=("steady", "long-context")[seed % 2]) for seed in range(17)),
    *(msgspec.structs.replace(TWO_RANKS, seed=seed) for seed in range(3)),
)
"""Seventeen on the sleeping device, every other one on a device whose time is mostly attention; three on the real one."""


def figures(bench: Bench, cases: Sequence[RunOptions] = CASES, iterations: int = ITERATIONS) -> list[Figure]:
    runs = [
        bench.run(msgspec.structs.replace(case, iterations=iterations))
        for case in bench.steps("healthy, uneven lengths", cases)
    ]
    verdicts = sum(len(run.of(Verdict)) for run in runs)
    squares = [sum(length**2 for length in event.lengths) for run in runs for event in run.of(MicroBatchPacked)]
    real = sum(case.device == "real" for case in cases)
    return [
        figure(
            "healthy: devices accused", verdicts, "", bar=0, better="lower",
            note=f"{len(runs)} runs of {iterations} iterations, {real} of them on the real device with 2 ranks; sum of squared "
            f"lengths of a micro-batch from {min(squares)} to {max(squares)}",
        ),
        done("healthy", runs),
        figure(
            "healthy: changes of plan", sum(len(run.of(PlanApplied)) - 1 for run in runs), "", better="lower",
        ),
    ]  # fmt: skip
