"""What instrumentation costs: iterations with and without it in turns, the same in microseconds a chunk, and the collector."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from unskew.analytics.workload import Work
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import TWO_RANKS, Bench, Ran, collectors, cpu_s, perform
from unskew.collector.events import Event, IterationCommitted, Span
from unskew.collector.paths import Store
from unskew.collector.spool import SpoolWriter
from unskew.runtime.device import ChunkOf, RealDevice

TURNS = 20
SETTLING = 5
"""Iterations at the start of a block that do not count: the collector is still busy with what the block before it wrote."""
PAIRS = 30
SKIPPED_PAIRS = 1
_RESAMPLES = 10_000
_CHUNKS = 2_000
_BATCH = 20


def figures(bench: Bench, pairs: int = PAIRS, always: int = 200) -> list[Figure]:
    """A run in turns, and one that is always instrumented to watch the collector in."""
    with tempfile.TemporaryDirectory(prefix="unskew-corpus-") as folder:
        # Documents of equal length, so that iterations are alike.
        (Path(folder) / "corpus.txt").write_bytes(b"".join(b"%063d\n" % number for number in range(20_000)))
        options = msgspec.structs.replace(TWO_RANKS, corpus=folder, mode="observe")
        length = 2 * TURNS * (pairs + SKIPPED_PAIRS)
        watch = _CollectorWatch(always)
        in_turns, steady = (
            bench.run(chosen, watch=seen)
            for chosen, seen in bench.steps(
                "overhead, real device, 2 ranks",
                [
                    (msgspec.structs.replace(options, instrument_turns=TURNS, iterations=length), None),
                    (msgspec.structs.replace(options, iterations=always), watch.see),
                ],
            )
        )
    differences, off_us = _paired(in_turns)
    low, high = _interval(differences)
    spans = len(steady.of(Span)) / always / options.ranks
    chunk_us = _instrumented_chunk_us()
    iteration_s = median(steady.summary.iteration_s)
    turns = f"{len(differences)} pairs of {TURNS} iterations with and without, in turns"
    return [
        figure(
            "overhead: instrumentation and spool, of the iteration", 100 * median(differences), "%", bar=1, better="lower",
            note=f"95 % interval {100 * low:.2f} to {100 * high:.2f} %; {turns}; real device, {options.ranks} ranks, "
            f"{off_us / 1e3:.1f} ms an iteration without",
        ),
        figure(
            "overhead: the same by CPU time, span by span", 100 * chunk_us * spans / (1e6 * iteration_s), "%", bar=None,
            better="lower",
            note=f"{chunk_us:.1f} us of CPU each for clocks, span, encoding and writing; {spans:.0f} a rank and iteration of "
            f"{1e3 * iteration_s:.1f} ms",
        ),
        figure(
            "overhead: the collector's CPU", watch.share_percent, "% of a core", bar=None, better="lower",
            note=f"at {len(steady.events) / sum(steady.summary.iteration_s):.0f} events a second; niced, a process of its own",
        ),
    ]  # fmt: skip


def _paired(run: Ran) -> tuple[list[float], float]:
    """Per pair of neighbouring blocks (median with - median without) / median without, and the median time without (us)."""
    if run.failure:
        raise RuntimeError(f"the run {run.failure}")
    times_us: dict[int, int] = {}
    for commit in run.of(IterationCommitted):
        times_us[commit.iteration] = max(commit.wall_us, times_us.get(commit.iteration, 0))
    blocks = [
        median(times_us[iteration] for iteration in range(start + SETTLING, start + TURNS))
        for start in range(2 * TURNS * SKIPPED_PAIRS, len(times_us), TURNS)
    ]
    with_us, without_us = blocks[::2], blocks[1::2]
    differences = [(on - off) / off for on, off in zip(with_us, without_us, strict=True)]
    return differences, median(without_us)


def _interval(differences: list[float]) -> tuple[float, float]:
    """95 % interval of the median by bootstrap over the pairs."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(differences, (_RESAMPLES, len(differences))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def _instrumented_chunk_us() -> float:
    """CPU time of the whole process per empty chunk that is timed, made a span, appended, encoded and written."""
    with tempfile.TemporaryDirectory(prefix="unskew-spans-") as folder:
        spool, device = SpoolWriter(Store(Path(folder)), "cost", "rank-0000.1"), RealDevice([])
        nothing = torch.zeros(1)
        chunk = ChunkOf("F", 0, 4, False, Work(256, 65536), 0)
        before_s = time.process_time()
        for number in range(_CHUNKS):
            _, timing = device.run(chunk, lambda: nothing)
            took = timing()
            spool.append(
                Span(
                    kind="F", device="cpu-0", rank=0, epoch=0, attempt=0, iteration=number, start_us=took.start_us,
                    wall_us=took.wall_us, micro_batch=1, first_layer=0, n_layers=4, compute_us=took.compute_us,
                    wait_pp_us=0, runq_us=took.runq_us,
                )
            )  # fmt: skip
            if number % _BATCH == _BATCH - 1:
                spool.hand_over(1.0)
        spent_s = time.process_time() - before_s
        spool.close()
    return 1e6 * spent_s / _CHUNKS


class _CollectorWatch:
    """CPU of the store's collector from the first quarter of a run to its end, as a share of a core."""

    def __init__(self, iterations: int) -> None:
        self._begin, self._end = iterations // 4, iterations - 1
        self._pid: int | None = None
        self._at_begin = (0.0, 0.0)
        self.share_percent: float | None = None

    def see(self, store: Store, event: Event) -> None:
        if not isinstance(event, IterationCommitted):
            return
        if event.iteration == self._begin and self._pid is None:
            self._pid = next(iter(collectors(store)), None)
            self._at_begin = self._now()
        elif event.iteration == self._end and self._pid is not None and self.share_percent is None:
            (cpu, wall), (cpu_before, wall_before) = self._now(), self._at_begin
            self.share_percent = 100 * (cpu - cpu_before) / (wall - wall_before)

    def _now(self) -> tuple[float, float]:
        return (cpu_s(self._pid) if self._pid is not None else 0.0), time.monotonic()


def main(json_path: Path | None, store: Store) -> None:
    perform("overhead", [figures], json_path, store)
