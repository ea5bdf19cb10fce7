"""Our executor against torch's own 1F1B, and split backward passes against whole ones: the same model, cut and micro-batches.

Two processes with Gloo, one thread each, a stage each; all methods take turns in them, on the same weights. What counts is the
processor time of both: where cores are shared the wall clock measures the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.scheduler.kept import nothing_kept
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.runtime.processes import CPU, Files, in_processes
from unskew.collector.events import Span
from unskew.runtime.corpus import Corpus
from unskew.runtime.links import Links
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.options import RunOptions
from unskew.runtime.rank.comm import Comm
from unskew.runtime.rank.device import RealDevice
from unskew.runtime.rank.executor import ExecutedWork, Executor
from unskew.runtime.rank.progress import RankProgress

OPTIONS = RunOptions(pp=2, dp=1, layers=8, dim=256, heads=4, tokens=256, micro_batches=8)
TURNS, WARM = 32, 3
TORCH = "torch's 1F1B"


def figures(bench: Bench, options: RunOptions = OPTIONS) -> list[Figure]:
    """Both ratios, each from pairs in turn."""
    for _ in bench.steps("the executor", ("turns",)):
        ranks = in_processes(2, partial(_turns, options=options))
    names = ("executor: processor time over torch's 1F1B", "executor: split backward passes over whole ones")
    if None in ranks:
        return [figure(name, None, "", better="lower", note="the processes did not end") for name in names]
    seconds = {
        name: [sum(rank.seconds[name][turn] for rank in ranks) for turn in range(WARM, TURNS)]
        for name in ("1f1b", "zb-h1", TORCH)
    }
    losses = {name: sum(rank.losses[name] for rank in ranks) for name in seconds}
    apart = max(abs(loss / losses[TORCH] - 1) for loss in losses.values())
    found = []
    for name, ours, other, bar in zip(names, ("1f1b", "zb-h1"), (TORCH, "1f1b"), (1.0, 1.05), strict=True):
        ratios = sorted(a / b for a, b in zip(seconds[ours], seconds[other], strict=True))
        quarter = len(ratios) // 4
        note = (
            f"both ranks, {len(ratios)} pairs in turn, middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}; "
            f"{1e3 * median(seconds[ours]):.0f} ms an iteration; losses differ by {apart:.0e}"
        )
        found.append(figure(name, median(ratios), "", bar=bar, better="lower", note=note))
    return found


class _Turns(msgspec.Struct):
    """Processor seconds of each turn, and the loss that this rank computed in the last one, by method."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]


class _Stage(nn.Module):
    """A stage's layers as torch's pipeline takes them: [micro-batches, tokens, ...] in and out."""

    def __init__(self, layers: Sequence[HeldLayer], lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self._lengths = nn.ModuleList(layer.module for layer in layers), lengths

    def forward(self, x: Tensor) -> Tensor:
        y = x[0]
        for layer in self.layers:
            y = layer(y, self._lengths)
        return y[None]


def _turns(files: Files, rank: int, options: RunOptions) -> _Turns:
    comm = Comm(files, 0, rank, (0, 1), [])
    comm.build()
    documents = [bytes((number * place + place // 7) % 256 for place in range(options.tokens + 1)) for number in range(1, 65)]
    batch = Batch(Corpus(documents), options, 0)
    plans = {
        name: uniform_plan(tp=1, pp=2, dp=1, n_layers=options.layers, micro_batches=options.micro_batches, schedule=name)
        for name in ("1f1b", "zb-h1")
    }
    held = {
        number: HeldLayer(options.size, number, seed=0, dtype=torch.float32, device=CPU)
        for number in plans["1f1b"].role_of[rank].layers
    }
    methods: dict[str, Callable[[], float]] = {
        name: partial(_ours, plan, held, batch, comm, options) for name, plan in plans.items()
    }
    methods[TORCH] = _torchs(held, batch, options, rank, files)
    found = _Turns({name: [] for name in methods}, {})
    for _ in range(TURNS):
        for name, method in methods.items():
            for layer in held.values():
                layer.clear_gradients()
            comm.all_gather(torch.zeros(1))
            began = time.process_time()
            loss = method()
            found.seconds[name].append(time.process_time() - began)
            found.losses[name] = loss
    return found


def _ours(plan: Plan, held: dict[int, HeldLayer], batch: Batch, comm: Comm, options: RunOptions) -> float:
    device, rank = RealDevice([]), comm.rank
    label = partial(Span, device="", rank=rank, plan_version=0, attempt=0, iteration=0)
    Executor(
        plan=plan, actions=build_schedule(plan).by_rank[rank], kept=nothing_kept(plan), layers=held, batch=batch, comm=comm,
        device=device, progress=RankProgress(), label=label, dtype=torch.float32, shapes=options.given_on,
        before=lambda _: None, links=Links(options, rank, device), executed=ExecutedWork(),
    ).run()  # fmt: skip
    return sum(sum(layer.losses.values()) for layer in held.values())


def _torchs(held: dict[int, HeldLayer], batch: Batch, options: RunOptions, rank: int, files: Files) -> Callable[[], float]:
    import torch.distributed as dist  # noqa: PLC0415 - a second of work, for one figure
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415

    dist.init_process_group("gloo", store=files.store, rank=rank, world_size=2)
    stage: Any = PipelineStage(_Stage([*held.values()], (options.tokens,)), rank, 2, CPU)

    def loss_of(y: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(y[0], targets[0], reduction="sum") / batch.target_tokens

    schedule: Any = Schedule1F1B(stage, options.micro_batches, loss_of, scale_grads=False)
    numbers = range(options.micro_batches)
    inputs, targets = (torch.stack([of(number, CPU) for number in numbers]) for of in (batch.inputs, batch.targets))

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=losses)
        return float(sum(float(loss.detach()) for loss in losses))

    return step
