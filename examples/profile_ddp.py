"""A DDP training that is not ours, profiled on every rank as docs/guide/own-trace.md says, then timed by its parts; then the
diagnosis of its traces and of its tables.

`python examples/profile_ddp.py [FOLDER]` starts two ranks on this machine (Gloo, CPU) with torchrun and imports what they
wrote; `--slow forward|backward|loader` makes rank 1 late in each step, by 40 ms unless `--late-ms` says otherwise, and with
`--micro-batches 4` gradients are accumulated over so many (`no_sync()`) before they are reduced.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS, WARM_UP, BATCH, WIDTH = 14, 2, 64, 512
PARTS = ("data_wait", "forward", "backward", "all_reduce", "optimizer")


class Late(torch.autograd.Function):
    """The identity, late in its forward or backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Model(torch.nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.late_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(Late.apply(self.first(x), *self.late_s)))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, late_s: float) -> None:
        self.rows, self.late_s = torch.randn(BATCH * STEPS, WIDTH), late_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.late_s and index % BATCH == 0:  # once a batch
            time.sleep(self.late_s)
        return self.rows[index]


def train(folder: Path, slow: str, late_s: float, micro_batches: int) -> None:
    """One rank of the job."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    late = {kind: late_s if rank == 1 and kind == slow else 0.0 for kind in ("forward", "backward", "loader")}
    model = DistributedDataParallel(Model(late["forward"], late["backward"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    traces, tables = folder / "traces", folder / "tables"
    for of in (traces, tables):
        of.mkdir(parents=True, exist_ok=True)
    window = torch.profiler.schedule(wait=1, warmup=WARM_UP - 1, active=STEPS - WARM_UP, repeat=1)

    def save(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(traces / f"rank-{rank}.json"))

    with torch.profiler.profile(schedule=window, on_trace_ready=save) as profiler:
        for x in DataLoader(Rows(late["loader"]), batch_size=BATCH):
            optimizer.zero_grad()
            *before, last = x.chunk(micro_batches)
            with model.no_sync():
                for part in before:
                    (model(part) - part).square().mean().backward()
            (model(last) - last).square().mean().backward()
            optimizer.step()
            profiler.step()
    with (tables / f"times-rank{rank}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["step", "seconds", *PARTS], *timed(model, optimizer, Rows(late["loader"]), micro_batches)])
    dist.destroy_process_group()


def timed(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rows: Rows, micro_batches: int
) -> Iterator[list[float]]:
    """Step, its seconds and those of its parts; the gradients are reduced by hand behind a backward pass timed apart."""
    batches = iter(DataLoader(rows, batch_size=BATCH))
    for step in range(STEPS):
        moments = [time.perf_counter()]
        x = next(batches)
        optimizer.zero_grad()
        moments.append(time.perf_counter())
        forward_s = 0.0
        with model.no_sync():
            for part in x.chunk(micro_batches):
                began = time.perf_counter()
                loss = (model(part) - part).square().mean()
                forward_s += time.perf_counter() - began
                loss.backward()
        moments.append(time.perf_counter())
        for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        waited_s, passes_s, *rest_s = (after - before for before, after in pairwise(moments))
        yield [step, moments[-1] - moments[0], waited_s, forward_s, passes_s - forward_s, *rest_s]


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a DDP training of two ranks and diagnose it.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("own-ddp"))
    parser.add_argument("--slow", choices=["nothing", "forward", "backward", "loader"], default="nothing")
    parser.add_argument("--late-ms", type=float, default=40.0)
    parser.add_argument("--micro-batches", type=int, default=1)
    options = parser.parse_args()
    store = ["--store", str(options.folder / "store")]
    if "LOCAL_RANK" in os.environ:  # torchrun has started this process as a rank
        train(options.folder, options.slow, options.late_ms / 1e3, options.micro_batches)
        # torch 2.13: a thread of Gloo that lets go of its last tensor while Python ends aborts the process, five times in 33.
        os._exit(0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, *sys.argv], check=True)
    unskew("import", "kineto", str(options.folder / "traces"), "--run", "own", *store)
    unskew("import", "iteration-times", str(options.folder / "tables"), "--run", "timed", *store)
    unskew("diagnose", "own", "timed", *store)


def unskew(*arguments: str) -> None:
    """The command, as in a shell."""
    subprocess.run([sys.executable, "-m", "unskew", *arguments], check=True)


if __name__ == "__main__":
    main()
