"""Trainings that know nothing of Unskew, in two or four forked ranks each: `python framework_job.py STORE FOLDER`.

The examples are run as they are, rank 1 slow in its backward pass; CASE-untouched is the same for fewer steps, without Unskew
and healthy. Each prints its losses, by rank 0, into FOLDER/CASE. Forked from one process, as the imports take longest.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.jobs.forked_ranks import forked_ranks
from support.paths import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import unskew

EXAMPLES = ROOT / "examples"
KEPT: list[nn.Module] = []
STEPS, UNTOUCHED_STEPS, MICRO_BATCHES, SKIPPED = 26, 6, 2, 3
CHUNKS, STAGES, REPLICAS, SHARDS = 3, 2, 2, 2
LATE_S = 0.015


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, reentrant in ((self.first, False), (self.second, True)):
            x = torch.relu(checkpoint(layer, x, use_reentrant=reentrant))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), backend="aot_eager", fullgraph=True)
        self.checkpointed = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.checkpointed(self.compiled(x))
        return found


def interrupted(model: nn.Module) -> None:
    """What is no step's work: an evaluation, a checkpoint, a collection of garbage."""
    model.eval()
    for batch in DataLoader(torch.randn(8, 32), batch_size=2):
        with torch.no_grad():
            model.module.checkpointed.first(batch)
    model.train()
    torch.save({"weights": torch.zeros(200_000)}, io.BytesIO())
    kept = [[number] for number in range(100_000)]
    gc.collect()
    del kept


class LateBackward(torch.autograd.Function):
    """The identity, late in its backward pass on the last rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch hands it over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(LATE_S)
        return gradients[0]


class LateLayers(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(LateBackward.apply(x))
        return found


def pipeline() -> None:
    """1F1B over two stages with two DDP replicas each, the last rank slow in its backward pass."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    part = nn.parallel.DistributedDataParallel(
        LateLayers(*(nn.Linear(64, 64) for _ in range(4))), process_group=mesh["dp"].get_group()
    )
    stage = PipelineStage(part, mesh["pp"].get_local_rank(), STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    for batch in DataLoader(torch.randn(8 * CHUNKS * STEPS, 64), batch_size=8 * CHUNKS):
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])
        optimizer.step()
    KEPT.append(part)


def sharded() -> None:
    """Two shards of each layer (DTensor) on each of two FSDP2 ranks, the last rank slow in its forward pass."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(torch.randn(16 * STEPS, 64), batch_size=16):
        optimizer.zero_grad()
        time.sleep(2 * LATE_S if dist.get_rank() == dist.get_world_size() - 1 else 0.0)
        model(batch).square().mean().backward()
        optimizer.step()
    KEPT.append(model)


def plain() -> None:
    """DDP with all at once: accumulation under `no_sync`, both kinds of checkpointing, a compiled part, a scaler that skips."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    batches, losses = iter(DataLoader(torch.randn(8 * MICRO_BATCHES * UNTOUCHED_STEPS, 32), batch_size=8)), []
    for step in range(UNTOUCHED_STEPS):
        optimizer.zero_grad()
        for last in (False, True):
            model.require_backward_grad_sync = last  # what no_sync() sets
            loss = model(next(batches)).square().mean() / MICRO_BATCHES
            losses.append(loss.item())
            scaler.scale(loss * (float("inf") if step == SKIPPED else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == UNTOUCHED_STEPS - 2:
            interrupted(model)
    if dist.get_rank() == 0:
        print("losses", json.dumps(losses))
    # Torch 2.13 may wait for ever in destroying the groups, with the interpreter's lock held, for a thread that wants it.
    KEPT.append(model)


def example(name: str, *more: str, slow: str = "backward") -> Callable[[str], None]:
    def run(case: str) -> None:
        touched = not case.endswith("untouched")
        late = ["--slow", slow, "--slow-from", "0"] if touched else []
        steps = str(STEPS if touched else UNTOUCHED_STEPS)
        sys.argv = [name, *late, *more, "--steps", steps, "--micro-batches", str(MICRO_BATCHES)]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


ALONE: dict[str, Callable[[str], None]] = {"pipeline": lambda _: pipeline(), "sharded": lambda _: sharded()}
"""Of four ranks each, without an untouched one beside them."""
CASES: dict[str, Callable[[str], None]] = {"plain": lambda _: plain(), "fsdp2": example("train_fsdp2.py")}


def ranks_of(case: str) -> int:
    return 4 if case in ALONE else 2


def rank_of(case: str, port: int, store: str, folder: Path, rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks_of(case))
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": case, **{k: str(v) for k, v in place.items()}})
    if rank == 0:
        os.dup2(os.open(folder / case, os.O_WRONLY | os.O_CREAT), 1)
    session = None if case.endswith("untouched") else unskew.attach(store, run=case)
    run = {**CASES, **ALONE}[case.removesuffix("-untouched")]
    run(case)
    if session is not None:
        session.close()
        assert not session.problem, session.problem
    sys.stdout.flush()


def main(store: str, folder: Path) -> int:
    os.chdir(folder)
    sys.path[0] = str(EXAMPLES)  # as for a script of that folder; modules here are named like those of others
    try:
        import accelerate.state  # noqa: F401, PLC0415 - an extra
        import lightning  # noqa: F401, PLC0415
        import transformers.trainer  # noqa: F401, PLC0415
        from transformers import LlamaForCausalLM  # noqa: F401, PLC0415

        CASES["hf"] = example("train_hf.py", "--out", str(folder / "hf-out"))
        CASES["lightning"] = example("train_lightning.py")
    except ImportError:
        pass
    if find_spec("torchtitan") is not None:
        CASES["torchtitan"] = example("train_torchtitan.py", "--out", str(folder / "titan-out"), slow="loader")
    for case in [*(f"{name}{tail}" for name in CASES for tail in ("", "-untouched")), *ALONE]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if not forked_ranks(ranks_of(case), partial(rank_of, case, port, store, folder)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
