"""A DDP training that knows nothing of Unskew, in two forked ranks: `python attached_job.py STORE FOLDER CASE...`

Each case is a run of the store, named like it (`run_of`); FOLDER gets a file of losses per case and rank. Rank 1 is late in one
part, from step N on (PART@N), by a time that its own step would not take, or ("device") takes `SLOWER` times as long for both
passes; CASE~SEED draws other data. Case "untouched" is "nothing" without Unskew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.jobs.forked_ranks import forked_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import unskew

STEPS, LATE_FROM, LATE_S, BATCH, WORDS, WIDTH = 64, 32, 0.012, 4, 64, 64
PARTS = ("loader", "forward", "backward", "optimizer", "other")
SLOWER = 1.5


class Late(torch.autograd.Function):
    """The identity, late in its forward or backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, job: Job) -> torch.Tensor:
        ctx.job = job
        job.late("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.job.late("backward")
        return gradients[0], None


class Timed(torch.autograd.Function):
    """The identity; `passed` hears when the backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.passed()
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.words, self.out = job, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.job.slow:
            self.job.begins()
            found: torch.Tensor = Timed.apply(self.out(self.layer(Timed.apply(self.words(x), self.job.ends))), self.job.begins)
            self.job.ends()
        else:
            found = self.out(Late.apply(self.layer(self.words(x)), self.job))
        return found


class Job(IterableDataset[torch.Tensor]):
    """`shard`: whose data it has; `late`: whether its rank is the one to be late."""

    def __init__(self, case: str, shard: int, *, late: bool) -> None:
        self.case, _, seed = case.partition("~")
        self.shard, self.is_late, self.step, self.began_s = shard, late, 0, 0.0
        self.random = torch.Generator().manual_seed(7 + 2 * int(seed or 0) + shard)

    def is_in(self, part: str) -> bool:
        """Whether this rank is late in a part of this step."""
        of, _, since = self.case.partition("@")
        return self.is_late and of == part and self.step >= int(since or 0)

    def late(self, part: str) -> None:
        if self.is_in(part):
            time.sleep(LATE_S)

    @property
    def slow(self) -> bool:
        return self.is_in("device")

    def begins(self) -> None:
        """A pass."""
        self.began_s = time.thread_time()

    def ends(self) -> None:
        time.sleep((SLOWER - 1) * (time.thread_time() - self.began_s))

    def length(self) -> int:
        if self.case == "longer":
            return 224 if self.is_late else 64
        if self.case == "random":
            return int(torch.randint(2, 9, (1,), generator=self.random)) * 24
        return 64

    def __iter__(self) -> Iterator[torch.Tensor]:
        for self.step in range(STEPS):
            self.late("loader")
            yield torch.randint(0, WORDS, (BATCH, self.length() + 1), generator=self.random)

    def train(self) -> list[float]:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = DistributedDataParallel(Model(self))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda *_: self.late("optimizer"))
        losses = []
        for batch in DataLoader(self, batch_size=None):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            self.late("other")
        return losses


def run_of(case: str) -> str:
    return case.replace("@", "-").replace("~", "-")


def rank_of(case: str, store: str, folder: Path, rank: int) -> None:
    if case != "untouched":
        session = unskew.attach(store, run=run_of(case))
        assert unskew.attach() is session
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{case}.store"), 2), rank=rank, world_size=2)
    losses = Job(case.replace("untouched", "nothing"), rank, late=rank == 1).train()
    if case != "untouched":
        session.close()
    (folder / f"{case}-{rank}.json").write_text(json.dumps(losses))


def main(store: str, folder: Path, cases: list[str]) -> int:
    for case in cases:
        if not forked_ranks(2, partial(rank_of, case, store, folder)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
