"""Trainings of somebody else on one GPU, watched: `python attach_job.py STORE FOLDER CASE...`

Each case is a run of the store (`run_of`). PART, PART@N, "device", "random", "longer", "nothing": two forked ranks that take
turns on the GPU, so that neither takes of the other's time, and sum their gradients by Gloo (NCCL refuses two ranks on one
device). Rank 1 is late in one part: in its passes by layers that it executes once more, all or ("device") half of them,
elsewhere by the host. After "ddp-" and "fsdp2-" both compute at once. "alone", "lengths", "cost": one rank, DDP by NCCL.
FOLDER gets what they measure besides.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.jobs.forked_ranks import forked_ranks
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks
from torch.utils.data import DataLoader, IterableDataset, dataloader

from unskew.runtime.attach import seams
from unskew.runtime.attach.start import attach

STEPS, LATE_FROM, LATE_S = 64, 32, 0.012
WORDS, WIDTH, LAYERS, BATCH, LENGTH = 64, 512, 4, 16, 512
WIDE, DOUBLINGS, DOCUMENTS, TRAINED = 1024, (7, 15), 8, 60
"""Of the case "lengths": the model's width, documents of 2 to the power of that many tokens, documents a step, steps."""
TURNS, TURN_STEPS, SKIPPED = 20, 20, 5
ALONE = ("alone", "lengths", "cost")
TOGETHER = DDP, FSDP2 = "ddp-", "fsdp2-"


class Late(torch.autograd.Function):
    """The identity, late in its forward or backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: LateModel) -> torch.Tensor:
        ctx.model = model
        model.again(x, "forward", LAYERS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.model.again(gradients[0], "backward", 2 * LAYERS)  # it takes twice a forward pass
        return gradients[0], None


class LateModel(nn.Module):
    def __init__(self, job: LateJob, width: int) -> None:
        super().__init__()
        self.job, self.words, self.out = job, nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, dropout=0.0) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Late.apply(self.words(x), self)  # type: ignore[no-untyped-call]
        for layer in self.layers:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]

    def again(self, x: torch.Tensor, part: str, layers: int) -> None:
        """What a pass that is late does more."""
        more = layers if self.job.is_late(part) else layers // 2 if self.job.is_late("device") else 0
        with torch.no_grad():
            for number in range(more):
                self.layers[number % LAYERS](x.detach())


class LateJob(IterableDataset[torch.Tensor]):
    def __init__(self, case: str, rank: int) -> None:
        how, _, self.case = case.rpartition("-")
        self.rank, self.step, self.sharded, self.takes_turns = rank, 0, f"{how}-" == FSDP2, not how and case not in ALONE
        self.random = torch.Generator().manual_seed(7 + rank)

    def is_late(self, part: str) -> bool:
        of, _, since = self.case.partition("@")
        return self.rank == 1 and of == part and self.step >= int(since or 0)

    def late(self, part: str) -> None:
        if self.is_late(part):
            time.sleep(LATE_S)

    def size(self) -> tuple[int, int]:
        """Documents of a batch, and their length."""
        if self.case == "longer":
            return BATCH, LENGTH * 2 if self.rank == 1 else LENGTH
        if self.case == "random":
            return BATCH, int(torch.randint(2, 9, (1,), generator=self.random)) * LENGTH // 4
        if self.case == "lengths":
            return 1, 2 ** int(torch.randint(*DOUBLINGS, (1,), generator=self.random))
        return (2 * BATCH if self.case in ALONE else BATCH), LENGTH

    def __iter__(self) -> Iterator[torch.Tensor]:
        for self.step in range(10_000):
            self.late("loader")
            documents, length = self.size()
            yield torch.randint(0, WORDS, (documents, length + 1), generator=self.random)


class Training:
    """Of one rank; `passes` takes what surrounds the forward and the backward pass of a micro-batch."""

    def __init__(self, job: LateJob, width: int = WIDTH, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self.job, self.bf16 = job, bf16
        model = LateModel(job, width).cuda()
        self.model: Any = model if job.takes_turns else _sharded(model) if job.sharded else DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.optimizer.register_step_pre_hook(lambda *_: job.late("optimizer"))
        self.batches, self.turn = iter(DataLoader(job, batch_size=None)), torch.zeros(1)

    def _sum_gradients(self) -> None:
        torch.cuda.synchronize()
        if self.job.rank == 1:
            dist.send(self.turn, 0)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def step(self, micro_batches: int = 1, passes: Callable[[str], Any] = lambda _: nullcontext()) -> None:
        self.optimizer.zero_grad()
        for last in [False] * (micro_batches - 1) + [True]:
            batch = next(self.batches).cuda()
            if self.job.takes_turns and self.job.rank == 0:
                dist.recv(self.turn, 1)
            with nullcontext() if last else self.model.no_sync(), torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
                with passes("F"):
                    answer = self.model(batch[:, :-1])
                    loss = nn.functional.cross_entropy(answer.flatten(0, 1), batch[:, 1:].flatten())
                with passes("B"):
                    loss.backward()  # type: ignore[no-untyped-call]
        if self.job.takes_turns:
            self._sum_gradients()
        self.optimizer.step()
        if micro_batches == 1:
            loss.item()
        self.job.late("other")


def _sharded(model: LateModel) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes a second

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


class PassTimer:
    """A pass between two looks at an idle GPU (ms)."""

    def __init__(self, kind: str, found: dict[str, list[float]]) -> None:
        self.kind, self.found = kind, found

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self.began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.found.setdefault(self.kind, []).append(1e3 * (time.perf_counter() - self.began_s))


def alone(job: LateJob) -> dict[str, list[float]]:
    """What passes take by a clock that waits for the GPU, after as many steps that nobody waits in."""
    training, found = Training(job), dict[str, list[float]]()
    for _ in range(STEPS):
        training.step()
    for _ in range(STEPS):
        training.step(passes=lambda kind: PassTimer(kind, found))
    return found


def lengths(job: LateJob) -> dict[str, list[float]]:
    """Documents of many lengths, one to a micro-batch."""
    training = Training(job, WIDE, bf16=True)
    for _ in range(TRAINED):
        training.step(DOCUMENTS)
    return {}


PLACES: list[tuple[Any, str]] = [
    (torch.autograd, "backward"), (DistributedDataParallel, "forward"), (dataloader._BaseDataLoaderIter, "__next__"),
    (hooks, "_global_optimizer_pre_hooks"), (hooks, "_global_optimizer_post_hooks"),
]  # fmt: skip
"""What a step of these jobs passes."""


def state() -> list[Any]:
    return [copy(getattr(owner, name)) for owner, name in PLACES]


def cost(job: LateJob, without: list[Any], session: Any) -> dict[str, list[float]]:
    """Milliseconds of a step, with and without the seams, in turns."""
    training, halves, found = Training(job), {True: state(), False: without}, dict[str, list[float]]()
    for turn in range(2 * TURNS + 2):
        on = (turn % 2 == 0) == (turn // 2 % 2 == 0)
        for (owner, name), value in zip(PLACES, halves[on], strict=True):
            setattr(owner, name, value)
        for _ in range(SKIPPED):
            training.step()
        torch.cuda.synchronize()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(TURN_STEPS):
            training.step()
        torch.cuda.synchronize()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        if turn >= 2:  # the first ones are a start's
            found.setdefault("with" if on else "without", []).append(1e3 * wall_s / TURN_STEPS)
            found.setdefault("cpu with" if on else "cpu without", []).append(1e3 * cpu_s / TURN_STEPS)
    for (owner, name), value in zip(PLACES, halves[True], strict=True):
        setattr(owner, name, value)
    session.flush(5.0)
    return found


def run_of(case: str) -> str:
    return case.replace("@", "-")


def rank_of(case: str, store: str, folder: Path, rank: int) -> None:
    without = state()
    if not case.startswith(TOGETHER):  # who takes turns takes nothing from the other: as if each had a GPU of its own
        setattr(seams, "gpu_name", lambda _: f"turn of rank {rank}")  # noqa: B010 - of the module that asks
    session = attach(store, run=run_of(case))
    torch.cuda.set_device(0)
    ranks, backend = (1, "nccl") if case in ALONE else (2, "gloo")
    dist.init_process_group(backend, store=FileStore(str(folder / f"{case}.store"), ranks), rank=rank, world_size=ranks)
    job, found = LateJob(case, rank), dict[str, list[float]]()
    if case == "alone":
        found = alone(job)
    elif case == "lengths":
        found = lengths(job)
    elif case == "cost":
        found = cost(job, without, session)
    else:
        training = Training(job)
        for _ in range(STEPS):
            training.step()
    session.close()
    found["peak"] = [torch.cuda.max_memory_allocated() / 1e6]
    (folder / f"{run_of(case)}-{rank}.json").write_text(json.dumps(found))


def main(store: str, folder: Path, cases: list[str]) -> int:
    for case in cases:
        if not forked_ranks(1 if case in ALONE else 2, partial(rank_of, case, store, folder)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
