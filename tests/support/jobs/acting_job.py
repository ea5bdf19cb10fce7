"""Trainings that let their samples be divided, in forked ranks: `python acting_job.py STORE FOLDER CASE...`

CASE is one of `CASES`: framework, how its loss is divided, and the plan that its ranks find from the first vote on. FOLDER
gets, per case and rank, what it was given and its parameters at the end; `reference` is the same in one process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.jobs.forked_ranks import forked_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unskew
from unskew.analytics.core.division import Division
from unskew.collector.paths import Store
from unskew.runtime.attach.asked.plan_file import ACTS, PlanForRanks, write_plan

WORDS, WIDTH, LONGEST, SAMPLES, EACH, IGNORED = 32, 16, 12, 96, 4, -100


class Case(NamedTuple):
    """`samples` and `window` of the plan, () = none; `loss`: mean or global; `mean_over` as in `session.balance`."""

    name: str
    ranks: int = 2
    framework: str = "ddp"
    loss: str = "mean"
    mean_over: str = "samples"
    samples: tuple[int, ...] = ()
    window: int = 0
    accumulate: int = 1
    resume_at: int = 0


CASES = {
    case.name: case
    for case in (
        Case("untouched"),
        Case("nothing"),
        Case("shares", samples=(6, 2)),
        Case("shares-fsdp2", framework="fsdp2", samples=(6, 2)),
        Case("shares-global", loss="global", samples=(6, 2)),
        Case("shares-accumulated", samples=(6, 2), accumulate=2),
        Case("shares-tokens", samples=(6, 2), mean_over="tokens", window=3),
        Case("shares-fsdp2-tokens", framework="fsdp2", samples=(6, 2), mean_over="tokens", window=3),
        Case("exclude", ranks=3, samples=(6, 0, 6)),
        Case("balanced", samples=(4, 4), window=4),
        Case("resumed", samples=(4, 4), window=4, resume_at=6),
        Case("unknown", loss="unknown", samples=(6, 2)),
    )
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        self.lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=random).tolist()
        self.words = torch.randint(0, WORDS, (SAMPLES, LONGEST + 1), generator=random)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.lengths[index]
        targets = self.words[index, 1:].clone()
        targets[length:] = IGNORED
        return {"index": torch.tensor(index), "words": self.words[index, :-1], "targets": targets}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)).double()


def loss_of(case: Case, model: nn.Module, batch: dict[str, torch.Tensor], ranks: int, whole: torch.Tensor) -> torch.Tensor:
    """Mean over tokens, or over samples; or a sum that is divided by what all ranks have together (`whole`)."""
    found, targets = model(batch["words"]).flatten(0, 1), batch["targets"].flatten()
    if case.loss == "global":
        return nn.functional.cross_entropy(found, targets, reduction="sum", ignore_index=IGNORED) / whole * ranks
    if case.mean_over == "tokens":
        return nn.functional.cross_entropy(found, targets, ignore_index=IGNORED)
    each = nn.functional.cross_entropy(found, targets, reduction="none", ignore_index=IGNORED)
    of_sample = each.view(len(batch["index"]), -1).sum(dim=1)
    return of_sample.sum() / len(of_sample) if case.loss == "unknown" else of_sample.mean()


class Job:
    """One rank of a case."""

    def __init__(self, case: Case, store: str, folder: Path, rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{case.name}.store"), case.ranks), rank=rank,
                                world_size=case.ranks)  # fmt: skip
        self.case, data, self.model = case, Rows(), model_of()
        self.trained: Any = self.model
        if case.framework == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - it takes a second
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

            fully_shard(self.model, mesh=init_device_mesh("cpu", (case.ranks,)))
        else:
            self.trained = DistributedDataParallel(self.model)
        self.sampler = DistributedSampler(data, num_replicas=case.ranks, rank=rank, shuffle=True, seed=3)
        self.loader: Any = DataLoader(data, batch_size=EACH, sampler=self.sampler)
        if case.name != "untouched":
            os.environ[ACTS] = "1"
            if case.samples and rank == 0:
                division = Division(samples=case.samples, window=case.window, slowness=(1.0,) * case.ranks)
                write_plan(Store(Path(store)), case.name, PlanForRanks(1, division))
            dist.barrier()
            self.session = unskew.attach(store, run=case.name)
            known, ddp = case.window or case.mean_over == "tokens", self.trained if case.framework == "ddp" else None
            self.loader = self.session.balance(self.loader, length=data.lengths if known else None, window=max(case.window, 1),
                                               mean_over=case.mean_over, model=ddp)  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.given: list[list[int]] = []
        self.losses: list[float] = []

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        case = self.case
        self.given.append(batch["index"].tolist())
        last = len(self.given) % case.accumulate == 0
        whole = (batch["targets"] != IGNORED).sum()
        if case.loss == "global":
            dist.all_reduce(whole)
        if case.framework == "ddp":
            self.trained.require_backward_grad_sync = last
        loss = loss_of(case, self.trained, batch, case.ranks, whole) / case.accumulate
        self.losses.append(loss.item())
        loss.backward()
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self) -> None:
        state: dict[str, Any] = {}
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for number, batch in enumerate(self.loader):
                if self.case.resume_at and (epoch, number) == (1, self.case.resume_at):
                    self.loader.load_state_dict(json.loads(json.dumps(state)))
                    self.given += [one["index"].tolist() for one in self.loader]
                    break
                self.step(batch)
                if self.case.resume_at:
                    state = self.loader.state_dict()

    @property
    def record(self) -> dict[str, Any]:
        full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in self.model.parameters()]
        parameters = torch.cat([one.detach().flatten() for one in full]).tolist()
        return {"given": self.given, "parameters": parameters, "losses": self.losses}


def train(case: Case, store: str, folder: Path, rank: int) -> Job:
    job = Job(case, store, folder, rank)
    job.train()
    (folder / f"{case.name}-{rank}.json").write_text(json.dumps(job.record))
    if case.name != "untouched":
        job.session.close()
    return job


def reference(case: Case, given: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """The parameters of one process that trains on what the ranks were given together: [rank][batch][sample]."""
    data, model = Rows(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(max(map(len, given))):
        indices = [index for of in given if number < len(of) for index in of[number]]
        rows = [data[index] for index in indices]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        whole = (batch["targets"] != IGNORED).sum()
        parts = [batch]
        if case.mean_over == "tokens" and len({len(of[number]) for of in given}) == 1:  # DDP's own mean, where nothing acts yet
            parts = [{name: of[at : at + EACH] for name, of in batch.items()} for at in range(0, len(indices), EACH)]
        for part in parts:
            (loss_of(case, model, part, 1, whole) / case.accumulate / len(parts)).backward()
        if (number + 1) % case.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [value for one in model.parameters() for value in one.detach().flatten().tolist()]


def main(store: str, folder: Path, names: Sequence[str]) -> int:
    for module in ("torch._dynamo", "torch.distributed.fsdp", "unskew.runtime.attach.balance"):
        importlib.import_module(module)  # once for all ranks: they take seconds
    for name in names:
        if not forked_ranks(CASES[name].ranks, partial(train, CASES[name], store, folder)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
