"""A DDP training that somebody kills a process of: `python killed_job.py FOLDER`, which knows nothing of Unskew.

The command forks two ranks and ends with 0, or with `FAILED` when one of them did not. FOLDER/steps-RANK holds how many steps
the rank has done; they train while FOLDER/`GO_ON` is there, and `AFTER` steps more.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

FAILED, AFTER, WIDTH, STEPS = 3, 150, 16, 100_000
GO_ON = "go-on"


def train(folder: Path, rank: int) -> object:
    """Returns what must live until the process ends: torch 2.13 frees a process group with the GIL held, and waits for a thread
    of its own that may be waiting for the GIL, for ever."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store.gloo"), 2), rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done, left, over = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_CREAT), AFTER, torch.zeros(1)
    for step, batch in enumerate(DataLoader(torch.ones(STEPS, WIDTH), batch_size=4), start=1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.pwrite(done, f"{step:8}".encode(), 0)
        time.sleep(0.004)
        dist.all_reduce(over.fill_(not (folder / GO_ON).exists()))
        left -= bool(over.item())
        if not left:
            break
    dist.destroy_process_group()
    return model, over


def main(folder: Path) -> int:
    importlib.import_module("torch._dynamo")  # DDP does, in each rank
    pids, kept = [], list[object]()
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = FAILED
            try:
                kept.append(train(folder, rank))
                code = 0
            except BaseException as error:
                sys.last_exc = error  # type: ignore[attr-defined]  # as the interpreter does, for its last words
            atexit._run_exitfuncs()
            os._exit(code)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    return FAILED if any(ended) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
