"""What instrumentation costs: iterations with and without it in turns, the same in microseconds a chunk, and the collector."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch
from support.processes import collectors, cpu_s

from unskew.analytics.core.workload import Work
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import TWO_RANKS, Bench, FinishedRun
from unskew.collector.events import Event, IterationCommitted, Span
from unskew.collector.paths import Store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.rank.device import ChunkOf, Device, RealDevice

PAIRS = 1_500
"""Of neighbouring iterations, one with and one without. On two shared cores an iteration resembles the next one (correlation
0.8) and not the one twenty later (0.4), so turns of one distinguish what blocks of twenty cannot."""
SKIPPED_PAIRS = 20
ODD = 11
"""Iterations from one checkpoint to the next: with and without in turns."""
_RESAMPLES = 2_000
_NEIGHBOURS = 20
"""Pairs resampled together: a busy second of the machine spans many of them."""
_CHUNKS = 2_000
_BATCH = 20


def figures(bench: Bench, pairs: int = PAIRS, always: int = 200) -> list[Figure]:
    """A run in turns, and one that is always instrumented to watch the collector in."""
    with tempfile.TemporaryDirectory(prefix="unskew-corpus-") as folder:
        # Documents of equal length, so that iterations are alike.
        (Path(folder) / "corpus.txt").write_bytes(b"".join(b"%063d\n" % number for number in range(20_000)))
        # A checkpoint every ten would always fall into iterations with: a fifth of the pairs, 3 % of their median.
        options = msgspec.structs.replace(TWO_RANKS, corpus=folder, mode="observe", checkpoint_every=ODD)
        length = 2 * (pairs + SKIPPED_PAIRS)
        watch = _CollectorWatch(always)
        in_turns, steady = (
            bench.run(chosen, watch=seen)
            for chosen, seen in bench.steps(
                "overhead, real device, 2 ranks",
                [
                    (msgspec.structs.replace(options, instrument_turns=1, iterations=length), None),
                    (msgspec.structs.replace(options, iterations=always), watch.see),
                ],
            )
        )
    differences, off_us = paired(in_turns)
    low, high = interval(differences)
    spans = len(steady.of(Span)) / always / options.ranks
    chunk_us = instrumented_chunk_us(RealDevice([]))
    iteration_s = median(steady.summary.iteration_s)
    turns = f"{len(differences)} pairs of iterations with and without, in turns"
    return [
        figure(
            "overhead: instrumentation and spool, of the iteration", 100 * median(differences), "%", bar=1, better="lower",
            note=f"95 % interval {100 * low:.2f} to {100 * high:.2f} %; {turns}; real device, {options.ranks} ranks, "
            f"{off_us / 1e3:.1f} ms an iteration without",
        ),
        figure(
            "overhead: the same by CPU time, span by span", 100 * chunk_us * spans / (1e6 * iteration_s), "%",
            better="lower",
            note=f"{chunk_us:.1f} us of CPU each for clocks, span, encoding and writing; {spans:.0f} a rank and iteration of "
            f"{1e3 * iteration_s:.1f} ms",
        ),
        figure(
            "overhead: the collector's CPU", watch.share_percent, "% of a core", better="lower",
            note=f"at {len(steady.events) / sum(steady.summary.iteration_s):.0f} events a second; niced, a process of its own",
        ),
        figure(
            "overhead: both together, of the ranks' cores",
            100 * median(differences) + (watch.share_percent or 0.0) / options.ranks,
            "%", bar=1, better="lower", note="the first and the third, spread over the ranks",
        ),
    ]  # fmt: skip


def paired(run: FinishedRun) -> tuple[list[float], float]:
    """Per pair of neighbours (with - without) / median without, and the median time without (us)."""
    if run.failure:
        raise RuntimeError(f"the run {run.failure}")
    times_us: dict[int, int] = {}
    for commit in run.of(IterationCommitted):
        times_us[commit.iteration] = max(commit.wall_us, times_us.get(commit.iteration, 0))
    in_order = [times_us[iteration] for iteration in range(2 * SKIPPED_PAIRS, len(times_us))]
    off_us = median(in_order[1::2])
    return [(on - off) / off_us for on, off in zip(in_order[::2], in_order[1::2], strict=True)], off_us


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % interval of the median by bootstrap over stretches of neighbouring pairs."""
    stretches = np.array(differences[: len(differences) // _NEIGHBOURS * _NEIGHBOURS]).reshape(-1, _NEIGHBOURS)
    chosen = np.random.default_rng(0).integers(len(stretches), size=(_RESAMPLES, len(stretches)))
    low, high = np.quantile([np.median(stretches[some]) for some in chosen], (0.025, 0.975))
    return float(low), float(high)


def instrumented_chunk_us(device: Device) -> float:
    """CPU time of the whole process per empty chunk that is timed, made a span, appended, encoded and written."""
    with tempfile.TemporaryDirectory(prefix="unskew-spans-") as folder:
        spool = SpoolWriter(Store(Path(folder)), "cost", "rank-0000.1")
        nothing = torch.zeros(1)
        chunk = ChunkOf("F", 0, 4, False, Work(256, 65536), 0)
        before_s = time.process_time()
        for number in range(_CHUNKS):
            _, timing = device.run(chunk, lambda: nothing)
            took = timing()
            spool.append(
                Span(
                    kind="F", device="cpu-0", rank=0, plan_version=0, attempt=0, iteration=number, start_us=took.start_us,
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
