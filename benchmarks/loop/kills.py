"""kill -9 of each rank in turn, at a random moment and inside both windows of the commit: is training the undisturbed one?"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from statistics import median

import msgspec
from support.processes import send_signal

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun, Watch, done, loss_difference
from unskew.collector.events import DeviceJoined, Event, IterationCommitted, Regrouped
from unskew.collector.paths import Store
from unskew.runtime.options import RunOptions

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="virtual", iterations=60)
POINTS = ("any moment", "before_barrier", "before_step")
CASES = tuple((rank, point) for rank in range(OPTIONS.ranks) for point in POINTS)
SINGLE_PRECISION = ((1, "before_barrier"), (3, "any moment"), (6, "before_step"))


def figures(
    bench: Bench,
    cases: Sequence[tuple[int, str]] = CASES,
    single: Sequence[tuple[int, str]] = SINGLE_PRECISION,
    options: RunOptions = OPTIONS,
) -> list[Figure]:
    """One failure-free reference per number format, then one run per case."""
    double = msgspec.structs.replace(options, dtype="float64")
    reference = bench.run(double).summary.losses
    runs = [_killed(bench, double, *case) for case in bench.steps("kill -9, float64", cases)]
    single_reference = bench.run(options).summary.losses if single else []
    single_runs = [_killed(bench, options, *case) for case in bench.steps("kill -9, float32", single)]
    survivors = [frozenset(range(options.ranks)) - {rank} for rank, _ in cases]
    seconds = [event.seconds for run in runs for event in run.of(Regrouped) if event.plan_version > 0]
    how = f"{options.iterations} iterations each; every one of {options.ranks} ranks, at {', '.join(POINTS)}; virtual device"
    return [
        done("kill", runs, how),
        figure(
            "kill: largest difference of any iteration's loss, float64",
            max(loss_difference(run, reference) for run in runs), "nats", bar=1e-8, better="lower",
            note="against the failure-free run of the same seed",
        ),
        figure(
            "kill: the same in float32",
            max((loss_difference(run, single_reference) for run in single_runs), default=None), "nats", better="lower",
            note=f"{len(single_runs)} runs; the order of summation differs",
        ),
        figure(
            "kill: runs in which a survivor is not the process it was",
            sum(run.same_process != expected for run, expected in zip(runs, survivors, strict=True)), "", bar=0, better="lower",
            note="pid and start time, six commits before the last",
        ),
        figure(
            "kill: (layer, micro-batch, F or B) not executed exactly once per committed iteration",
            sum(run.not_once for run in runs), "", bar=0, better="lower", note="from the log, by plan version and attempt",
        ),
        figure("kill: iterations whose log is not complete", sum(run.incomplete for run in runs), "", bar=0, better="lower"),
        figure(
            "kill: from the death until all survivors have regrouped, median", median(seconds) if seconds else None, "s",
            bar=0.5, better="lower", note="death as the kernel reports it to the parent; all survivors on the new plan",
        ),
        figure("kill: the same, longest", max(seconds, default=None), "s", better="lower"),
    ]  # fmt: skip


def _killed(bench: Bench, options: RunOptions, rank: int, point: str) -> FinishedRun:
    chance = random.Random(f"{rank}/{point}")
    at = chance.randint(5, options.iterations - 10)
    if point == "any moment":
        return bench.run(options, watch=_killer(rank, at, chance.uniform(0.0, 0.1)))
    return bench.run(options, f"kill:rank={rank},at={at},point={point}")


def _killer(rank: int, at: int, delay_s: float) -> Watch:
    """Kill `rank` from outside, `delay_s` after iteration `at` was seen to be committed."""
    pids: dict[int, int] = {}

    def watch(_: Store, event: Event) -> None:
        if isinstance(event, DeviceJoined):
            pids[event.rank] = event.pid
        elif isinstance(event, IterationCommitted) and event.iteration == at and rank in pids:
            threading.Timer(delay_s, send_signal, (pids.pop(rank), signal.SIGKILL)).start()

    return watch
