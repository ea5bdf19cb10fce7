"""A data-parallel job of our making as its owner would record it: a profiler trace a rank, or tables of what was timed.

Ranks do the same work, vary by `NOISE`, and meet in an all-reduce behind their backward pass; rank 1 may be late in one part.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

Part = Literal["nothing", "loader", "forward", "backward"]
LATE, NOISE = 1, 0.03
TOOK_S = {"loader": 0.0001, "forward": 0.001, "backward": 0.002}
REDUCE_S, OPTIMIZER_S, OVERHEAD_S = 0.0005, 0.0003, 0.00003


class RankStep(NamedTuple):
    """One rank's step: when it began and its parts (seconds), one after the other; `wait` is until all have reduced."""

    rank: int
    step: int
    begin: float
    loader: float
    forward: float
    backward: float
    wait: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return sum(self[3:]) + OVERHEAD_S


def job(part: Part, *, ranks: int = 2, steps: int = 14, late_s: float = 0.04, seed: int = 3) -> list[RankStep]:
    """The steps, in order; rank 1 is late in all of them."""
    random, free, found = np.random.default_rng(seed), np.full(ranks, 10.0), []
    for step in range(steps):
        took = {name: s * np.exp(random.normal(0, NOISE, ranks)) for name, s in TOOK_S.items()}
        if part != "nothing":
            took[part][LATE] += late_s * np.exp(random.normal(0, 0.01))
        ready = free + sum(took.values())
        reduced = ready.max() + REDUCE_S + random.exponential(2e-5, ranks)
        for rank in range(ranks):
            own = (float(took[name][rank]) for name in TOOK_S)
            found.append(RankStep(rank, step, float(free[rank]), *own, float(reduced[rank] - ready[rank]), OPTIMIZER_S))
        free = reduced + OPTIMIZER_S + OVERHEAD_S
    return found


def kineto(folder: Path, steps: Sequence[RankStep], *, buckets: int = 1) -> Path:
    """What torch's profiler writes of the job with Gloo on cores, a file per rank. With more than one of DDP's `buckets` those
    before the last are reduced beside the backward pass."""
    events: dict[int, list[dict[str, Any]]] = {}
    for one in steps:
        mine, at = events.setdefault(one.rank, []), 1e6 * one.begin

        def put(name: str, begin: float, took_s: float, cat: str = "user_annotation", to: list[Any] = mine) -> float:
            to.append({"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": 1e6 * took_s, "pid": 1, "tid": 1, "args": {}})
            return begin + 1e6 * took_s

        put(f"ProfilerStep#{one.step}", at, one.seconds)
        at = put("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, one.loader)
        at = put("DistributedDataParallel.forward", at, one.forward)
        for part in range(1, buckets):
            here = [of for of in steps if of.step == one.step]
            full = [of.begin + of.loader + of.forward + of.backward * part / buckets for of in here]
            put("gloo:all_reduce", 1e6 * full[one.rank], max(full) - full[one.rank] + REDUCE_S / buckets)
        at = put("autograd::engine::evaluate_function: AddmmBackward0", at, one.backward / 2, "cpu_op")
        at = put("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", at, one.backward / 2, "cpu_op")
        at = put("gloo:all_reduce", at, one.wait)
        put("Optimizer.step#SGD.step", at, one.optimizer)
    folder.mkdir(parents=True)
    for rank, own in events.items():
        trace = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": len(events)}, "traceEvents": own}
        (folder / f"rank-{rank}.json").write_text(json.dumps(trace))
    return folder


def step_table(path: Path, steps: Iterable[RankStep], *, parts: Iterable[str] = (), name_rank: bool = True) -> Path:
    """What a loop that times its own steps writes, with the parts of each step that it times apart."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *(["rank"] if name_rank else []), "seconds", *parts])
        for one in steps:
            of = {"data_wait": one.loader, "all_reduce": one.wait, "forward": one.forward, "backward": one.backward}
            table.writerow([one.step, *([one.rank] if name_rank else []), one.seconds, *(of[part] for part in parts)])
    return path


def chunk_table(path: Path, steps: Iterable[RankStep], *, reduce_apart: bool) -> Path:
    """Forward and backward times in NDTimeline's columns; the backward pass holds the all-reduce, or stands beside it."""
    rows = []
    for one in steps:
        where, at = (one.rank, 0, one.rank, one.step), one.begin + one.loader
        backward = one.backward + (0.0 if reduce_apart else one.wait)
        rows.append((*where, "forward-compute", at, one.forward, 0, 0, 0, 0))
        rows.append((*where, "backward-compute", at + one.forward, backward, 0, 0, 0, 0))
        if reduce_apart:
            rows.append((*where, "grads-reduce-scatter", at + one.forward + one.backward, one.wait, 0, 0, -1, 0))
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
    pl.DataFrame(rows, schema=list(names), orient="row").write_parquet(path)
    return path
