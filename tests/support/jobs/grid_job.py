"""Trainings under frameworks that are not ours, which know nothing of Unskew: `python grid_job.py STORE FOLDER CASE...`

A CASE is FRAMEWORK:PART[@STEP]~SEED: what befalls the last rank from that step on, or what is unlike between ranks that are
well (`attached_job.Job`; besides, `gc` collects garbage, `link` makes every sum late on all ranks, `dies` and `hangs` end a
rank). A run of the store is named like its case (`run_of`). STORE "": the command that watches names it, and has attached.

Ranks are forked from one process, as imports take longest. Two train data-parallel; of four, two are a pipeline or a group.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.jobs.attached_job import BATCH, LATE_S, STEPS, WIDTH, WORDS, Job, Late, Model
from support.jobs.forked_ranks import forked_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import unskew

GARBAGE, CHUNKS = 150_000, 3
KEPT: list[object] = []


class Probe(Job):
    """`Job`, whose data is that of the data-parallel rank, so that who shares a batch has the same."""

    def __init__(self, case: str, shard: int) -> None:
        super().__init__(case, shard, late=dist.get_rank() == dist.get_world_size() - 1)
        self.garbage = [[number] for number in range(GARBAGE)] if self.is_late and self.case.startswith("gc") else []

    def length(self) -> int:
        """Of `longer`, all ranks of the last replica are given more."""
        return 224 if self.case == "longer" and self.shard else super().length()

    def step_ends(self) -> None:
        self.late("other")
        if self.is_in("gc"):
            gc.collect()
        if self.is_in("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.is_in("hangs"):
            time.sleep(3600)


class Optimizer(torch.optim.AdamW):
    """Late as the job says, in its own part of the step: what a framework runs within it comes before."""

    def __init__(self, model: nn.Module, job: Probe) -> None:
        super().__init__(model.parameters(), lr=1e-3)
        self.job = job

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.job.late("optimizer")
        super().step()
        return loss


class LateLayer(nn.Module):
    """The identity, late in its passes as the job says."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Late.apply(x, self.job)
        return found


def loss_of(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def by_hand(model: nn.Module, job: Probe) -> None:
    """A loop that anybody would write."""
    optimizer = Optimizer(model, job)
    for batch in DataLoader(job, batch_size=None):
        optimizer.zero_grad()
        loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
        job.step_ends()
    KEPT.append(model)


def ddp(case: str) -> None:
    job = Probe(case, dist.get_rank())
    model = DistributedDataParallel(Model(job))
    if job.case == "link":
        model.register_comm_hook(None, over_a_slow_link)
    by_hand(model, job)


def over_a_slow_link(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of the gradients, as late on each rank as over a link that is slow: nobody computes meanwhile."""

    def arrived(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        time.sleep(LATE_S)
        return summed.value()[0] / dist.get_world_size()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrived)


# DDP compares them with the types themselves.
over_a_slow_link.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def fsdp2(case: str) -> None:
    job = Probe(case, dist.get_rank())
    model, mesh = Model(job), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.layer, model):
        fully_shard(part, mesh=mesh)
    by_hand(model, job)


def tp(case: str) -> None:
    """Two shards of each layer (DTensor) on each of two FSDP2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    job = Probe(case, mesh["dp"].get_local_rank())
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.Linear(4 * WIDTH, WIDTH),
        LateLayer(job),
        nn.Linear(WIDTH, WORDS),
    )
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    by_hand(model, job)


def pp(case: str) -> None:
    """1F1B over two stages of two DDP replicas each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    job = Probe(case, mesh["dp"].get_local_rank())
    ends = [nn.Embedding(WORDS, WIDTH)] if place == 0 else [nn.Linear(WIDTH, WORDS)]
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
    late = LateLayer(job)
    part = nn.Sequential(*ends, layer, late) if place == 0 else nn.Sequential(layer, late, *ends)
    replica = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
    stage = PipelineStage(replica, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_of)
    optimizer = Optimizer(replica, job)
    for one in DataLoader(job, batch_size=None):
        optimizer.zero_grad()
        batch = one.repeat(CHUNKS, 1)
        if stage.is_first:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:], losses=[])
        optimizer.step()
        job.step_ends()
    KEPT.append(replica)


def hf(case: str, out: str) -> None:
    """Hugging Face's Trainer on a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415 - an extra

    job = Probe(case, dist.get_rank())

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.step_ends()

    class Own(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Iterable[dict[str, torch.Tensor]]:
            """The job's own, which is a rank's already."""
            return DataLoader(job, batch_size=None, collate_fn=lambda of: {"input_ids": of, "labels": of})

        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = Optimizer(self.model, job)
            return self.optimizer

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4
        )
    )
    model.model.norm = nn.Sequential(model.model.norm, LateLayer(job))
    arguments = TrainingArguments(
        output_dir=out, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, ddp_backend="gloo", report_to=[],
        save_strategy="no", logging_steps=STEPS, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Own(model=model, args=arguments, callbacks=[Ends()])
    trainer.train()
    KEPT.append(trainer)


def lightning(case: str) -> None:
    """A Lightning module under its DDP."""
    from lightning import LightningModule, Trainer  # noqa: PLC0415 - an extra
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    job = Probe(case, dist.get_rank())

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(job)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.model(batch[:, :-1]), batch[:, 1:])

        def on_train_batch_end(self, *_: Any) -> None:
            job.step_ends()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Optimizer(self, job)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(job, batch_size=None))
    KEPT.append(trainer)


NEEDS = {"hf": "transformers", "lightning": "lightning"}
MODULES = {
    "hf": ("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate.state"),
    "lightning": ("lightning",),
}
RANKS = {"ddp": 2, "fsdp2": 2, "hf": 2, "lightning": 2, "tp": 4, "pp": 4}


def here(framework: str) -> bool:
    """Whether what it needs is installed."""
    return framework not in NEEDS or find_spec(NEEDS[framework]) is not None


def run_of(case: str) -> str:
    return case.translate(str.maketrans(":@~", "---"))


def rank_of(case: str, store: str, folder: Path, port: int, rank: int) -> None:
    framework, _, probe = case.partition(":")
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), RANKS[framework])
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": run_of(case), **{k: str(v) for k, v in place.items()}}
    )
    session = unskew.attach(store, run=run_of(case)) if store else None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    frameworks: dict[str, Callable[[str], None]] = {
        "ddp": ddp, "fsdp2": fsdp2, "tp": tp, "pp": pp, "hf": partial(hf, out=str(folder / "hf")), "lightning": lightning,
    }  # fmt: skip
    frameworks[framework](probe)
    if session is not None:
        session.close()


def main(store: str, folder: Path, cases: list[str]) -> int:
    """`store` "": the command that watches has attached to this process."""
    for framework in {case.partition(":")[0] for case in cases}:
        for module in MODULES.get(framework, ()):
            importlib.import_module(module)
    for case in cases:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if not forked_ranks(RANKS[case.partition(":")[0]], partial(rank_of, case, store, folder, port)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
