"""What watching a DDP training of somebody else costs each rank: the same job with and without, in turns.

Two forked ranks on real CPU cores. By CPU time of the whole process (its threads that encode and write included), in a job that
computes next to nothing, so that the difference stands out; by the wall clock in one whose steps take some 20 ms. And what
`import unskew` and `attach()` cost a process that has imported torch.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.runtime.attach.start import attach

TURNS = 12
SKIPPED = 10
MICRO_BATCHES = 4
BAR_US, BAR_PERCENT, WALL_PERCENT = 20.0, 0.3, 1.0
STARTS, START_MS = 7, 50.0
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


class Job(NamedTuple):
    """What is trained: `layers` of `width`, on batches of `batch` rows."""

    steps: int
    layers: int
    width: int
    batch: int
    micro_batches: int


LIGHT, HEAVY = Job(600, 1, 8, 4, 1), Job(60, 4, 768, 48, 1)


def figures(bench: Bench, turns: int = TURNS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-overhead-") as folder:
        light = {each: _pairs(bench, Path(folder), LIGHT._replace(micro_batches=each), turns) for each in {1, MICRO_BATCHES}}
        heavy = _pairs(bench, Path(folder), HEAVY, turns)
        starts_ms = [_start_ms(Path(folder)) for _ in bench.steps("starts", range(min(STARTS, turns)))]
    of_cpu = {each: [1e6 * (on[0] - off[0]) / each for on, off in pairs] for each, pairs in light.items()}
    of_step_us = median(of_cpu[1])
    wall = [100 * (on[1] - off[1]) / off[1] for on, off in heavy]
    low, high = _interval(wall)
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
               note=f"of a step of {step_ms:.1f} ms: median {median(wall):.2f} %, from {low:.2f} %"),
        figure("attach: CPU of import and attach, the most", max(starts_ms), "ms", bar=START_MS, better="lower",
               note=f"{len(starts_ms)} starts behind `import torch`, median {median(starts_ms):.1f} ms"),
    ]  # fmt: skip


def _start_ms(folder: Path) -> float:
    """CPU time of a fresh process, whose compiled modules are on the disk."""
    command = [sys.executable, "-c", _START, str(folder / "store")]
    return 1e3 * float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _pairs(bench: Bench, folder: Path, job: Job, turns: int) -> list[tuple[Turn, Turn]]:
    """(with, without) per turn and rank."""
    found = []
    what = f"overhead of watching, {job.steps} steps of {job.micro_batches} micro-batches, {job.width} wide"
    for turn in bench.steps(what, range(turns)):
        out = folder / f"{'-'.join(map(str, job))}-{turn}"
        out.mkdir()
        order = ("on", "off") if turn % 2 else ("off", "on")
        subprocess.run([sys.executable, __file__, str(out), *order, *map(str, job)], check=True)
        for rank in range(2):
            on, off = (json.loads((out / f"{which}-{rank}.json").read_text()) for which in ("on", "off"))
            found.append(((on[0], on[1]), (off[0], off[1])))
    return found


def _between(values: Sequence[float]) -> str:
    low, high = _interval(values)
    return f"95 % interval {low:.1f} to {high:.1f}"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    chosen = np.random.default_rng(0).choice(np.array(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main(folder: Path, order: Sequence[str], job: Job) -> None:
    """One turn: both halves in the order given, two ranks each, forked from this process."""
    importlib.import_module("torch.distributed")  # once for all ranks
    for which in order:
        pids = []
        for rank in range(2):
            if (pid := os.fork()) == 0:
                try:
                    _train(folder, which, rank, job)
                    os._exit(0)
                finally:
                    os._exit(1)
            pids.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            sys.exit(1)


def _train(folder: Path, which: str, rank: int, job: Job) -> None:
    import torch  # noqa: PLC0415 - here alone
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, IterableDataset  # noqa: PLC0415

    class Rows(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.ones(job.batch, job.width)

    session = attach(folder / "store", run="cost") if which == "on" else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / which}.store", rank=rank, world_size=2)
    layers = (torch.nn.Linear(job.width, job.width) for _ in range(job.layers))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(DataLoader(Rows(), batch_size=None))
    times, before_s = list[float](), 0.0
    for step in range(SKIPPED + job.steps):
        if step == SKIPPED:
            before_s = time.process_time()
        began_s = time.perf_counter()
        for last in [False] * (job.micro_batches - 1) + [True]:
            with nullcontext() if last else model.no_sync():
                model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began_s)
    if session is not None:
        session.close()
    spent_s = (time.process_time() - before_s) / job.steps
    (folder / f"{which}-{rank}.json").write_text(json.dumps([spent_s, median(times[SKIPPED:])]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:4], Job(*map(int, sys.argv[4:])))
