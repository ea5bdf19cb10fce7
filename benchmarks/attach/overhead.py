"""What watching a DDP training of somebody else costs each rank: the same job with and without, in turns.

Two forked ranks on real CPU cores, which both go through all turns: what two processes differ by from start to start (70 us of
a step of a millisecond) is then in neither half. Without means that torch is as it was before `attach()`; the thread that beats
twice a second goes on meanwhile. By CPU time of the whole process (its threads that encode and write included, to the last line
of a half), in a job that computes next to nothing, so that the difference stands out; by the wall clock in one whose steps take
some 20 ms. And what `import unskew` and `attach()` cost a process that has imported torch.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.runtime.attach.start import attach

TURNS, WALL_TURNS = 40, 160
"""By the wall clock a half differs from the next by 5 %, so many are needed to see 1 %."""
SKIPPED = 10
MICRO_BATCHES = 4
BAR_US, BAR_PERCENT, WALL_PERCENT = 20.0, 0.3, 1.0
STARTS, START_MS, LONGEST_S = 7, 50.0, 5.0
_START = """
import sys, time, torch, torch.distributed
before_s = time.process_time()
import unskew
unskew.attach(sys.argv[1], run="start")
print(time.process_time() - before_s)
"""
STEP_MS = 22.0
"""Of the step that the bars were set for."""
_RESAMPLES = 2_000
Turn = tuple[float, float]
"""CPU seconds of a step, and its median seconds by the wall clock."""


class LoopSize(NamedTuple):
    """What is trained: `layers` of `width`, on batches of `batch` rows."""

    steps: int
    layers: int
    width: int
    batch: int
    micro_batches: int


LIGHT, HEAVY = LoopSize(200, 1, 8, 4, 1), LoopSize(40, 4, 768, 48, 1)


def figures(bench: Bench, turns: int = TURNS, wall_turns: int = WALL_TURNS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-overhead-") as folder:
        light_jobs = {each: LIGHT._replace(micro_batches=each) for each in (1, MICRO_BATCHES)}
        jobs = [*light_jobs.values(), HEAVY]
        found = {
            job: _pairs(Path(folder), job, wall_turns if job is HEAVY else turns)
            for job in bench.steps("trainings of two ranks", jobs)
        }
        light, heavy = {each: found[job] for each, job in light_jobs.items()}, found[HEAVY]
        starts_ms = [_start_ms(Path(folder)) for _ in bench.steps("starts", range(min(STARTS, turns)))]
    of_cpu = {each: [1e6 * (on[0] - off[0]) / each for on, off in pairs] for each, pairs in light.items()}
    of_step_us = median(of_cpu[1])
    wall = [100 * (on[1] - off[1]) / off[1] for on, off in heavy]
    low, high = interval(wall)
    step_ms = 1e3 * median(off[1] for _, off in heavy)
    beside = f"{turns} turns with and without, of {LIGHT.steps} steps; two ranks, real CPU cores, Gloo"
    return [
        figure("attach: CPU a micro-batch, a step of one", of_step_us, "us", bar=BAR_US, better="lower",
               note=f"{_between(of_cpu[1])}; {beside}"),
        figure(f"attach: CPU a micro-batch, a step of {MICRO_BATCHES}", median(of_cpu[MICRO_BATCHES]), "us", bar=BAR_US,
               better="lower", note=f"{_between(of_cpu[MICRO_BATCHES])}; {beside}"),
        figure(f"attach: CPU of a step of {STEP_MS:g} ms", of_step_us / 10 / STEP_MS, "%", bar=BAR_PERCENT, better="lower",
               note="the first, of that"),
        figure("attach: wall clock, upper end of the 95 % interval", high, "%", bar=WALL_PERCENT, better="lower",
               note=f"of a step of {step_ms:.1f} ms: median {median(wall):.2f} %, from {low:.2f} %; {wall_turns} turns"),
        figure("attach: CPU of import and attach, the most", max(starts_ms), "ms", bar=START_MS, better="lower",
               note=f"{len(starts_ms)} starts behind `import torch`, median {median(starts_ms):.1f} ms"),
    ]  # fmt: skip


def _start_ms(folder: Path) -> float:
    """CPU time of a fresh process, whose compiled modules are on the disk."""
    command = [sys.executable, "-c", _START, str(folder / "store")]
    return 1e3 * float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _pairs(folder: Path, job: LoopSize, turns: int) -> list[tuple[Turn, Turn]]:
    """(with, without) per turn, the means of both ranks: they take each step together, so one says little beside the other."""
    out = folder / "-".join(map(str, job))
    out.mkdir()
    subprocess.run([sys.executable, __file__, str(out), str(turns), *map(str, job)], check=True)
    of_ranks = [msgspec.json.decode((out / f"{rank}.json").read_bytes(), type=list[tuple[Turn, Turn]]) for rank in range(2)]
    of_turns = np.mean(np.array(of_ranks), axis=0)  # by turn, half, figure
    return [((on[0], on[1]), (off[0], off[1])) for on, off in of_turns.tolist()]


def _between(values: Sequence[float]) -> str:
    low, high = interval(values)
    return f"95 % interval {low:.1f} to {high:.1f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    chosen = np.random.default_rng(0).choice(np.array(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main(folder: Path, turns: int, job: LoopSize) -> None:
    """Two ranks, forked from this process."""
    for name in ("torch.distributed", "torch._dynamo"):  # once for both; DDP imports the second
        importlib.import_module(name)
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:
                _rank(folder, rank, job, turns)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    failed = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(failed):
        sys.exit(1)


def _rank(folder: Path, rank: int, job: LoopSize, turns: int) -> None:
    import torch  # noqa: PLC0415 - here alone
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.optim import optimizer as hooks  # noqa: PLC0415
    from torch.utils.data import DataLoader, IterableDataset, dataloader  # noqa: PLC0415

    class RandomRows(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.ones(job.batch, job.width)

    places: list[tuple[Any, str]] = [
        (torch.autograd, "backward"), (DistributedDataParallel, "forward"), (dataloader._BaseDataLoaderIter, "__next__"),
        (hooks, "_global_optimizer_pre_hooks"), (hooks, "_global_optimizer_post_hooks"),
    ]  # fmt: skip

    def state() -> list[Any]:
        """What a step of this job passes."""
        return [copy(getattr(owner, name)) for owner, name in places]

    without = state()
    session = attach(folder / "store", run="cost")
    halves = {True: state(), False: without}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    layers = (torch.nn.Linear(job.width, job.width) for _ in range(job.layers))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(DataLoader(RandomRows(), batch_size=None))

    def step() -> float:
        began_s = time.perf_counter()
        for last in [False] * (job.micro_batches - 1) + [True]:
            with nullcontext() if last else model.no_sync():
                model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    def half(*, on: bool) -> Turn:
        for (owner, name), value in zip(places, halves[on], strict=True):
            setattr(owner, name, value)
        _, before_s = [step() for _ in range(SKIPPED)], time.process_time()
        times = [step() for _ in range(job.steps)]
        if on:
            session.flush(LONGEST_S)
        return (time.process_time() - before_s) / job.steps, median(times)

    pairs = []
    for turn in range(turns + 1):  # the first is a start's
        order = (True, False) if turn % 2 else (False, True)
        found = {on: half(on=on) for on in order}
        pairs.append((found[True], found[False]))
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(pairs[1:]))
    session.close()
    # Without destroy_process_group: it holds Python while Gloo's thread ends, which may be waiting for Python, for ever.


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), LoopSize(*map(int, sys.argv[3:])))
