"""Two ranks that go through halves with and without being watched, by us or by a published tool: the script of `overhead`.

`python cost_job.py FOLDER TURNS TOOL STEPS LAYERS WIDTH BATCH MICRO_BATCHES` writes per rank what each half took.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from unskew.runtime.attach.start import attach

SKIPPED = 10
LONGEST_S = 5.0
PORT = "UNSKEW_BENCH_TRACEML_PORT"
"""Where TraceML's aggregator listens."""
SESSION = "cost"
Turn = tuple[float, float]
"""CPU seconds of a step, and its median seconds by the wall clock."""


class LoopSize(NamedTuple):
    """What is trained: `layers` of `width`, on batches of `batch` rows."""

    steps: int
    layers: int
    width: int
    batch: int
    micro_batches: int


class Watching(NamedTuple):
    """How a half is watched: what is done before it, what each of its steps is in, and what is left to do at its end."""

    switch: Callable[[bool], None]
    step: Callable[[Any], AbstractContextManager[Any]] = lambda _model: nullcontext()
    settle: Callable[[], object] = lambda: None


def by_unskew(folder: Path, _rank: int) -> Watching:
    """Without it torch is as it was before `attach()`."""
    import torch  # noqa: PLC0415 - here alone
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.optim import optimizer as hooks  # noqa: PLC0415
    from torch.utils.data import dataloader  # noqa: PLC0415

    places: list[tuple[Any, str]] = [
        (torch.autograd, "backward"), (DistributedDataParallel, "forward"), (dataloader._BaseDataLoaderIter, "__next__"),
        (hooks, "_global_optimizer_pre_hooks"), (hooks, "_global_optimizer_post_hooks"),
    ]  # fmt: skip

    def state() -> list[Any]:
        """What a step of this job passes."""
        return [copy(getattr(owner, name)) for owner, name in places]

    def switch(on: bool) -> None:
        for (owner, name), value in zip(places, halves[on], strict=True):
            setattr(owner, name, value)

    without = state()
    session = attach(folder / "store", run=SESSION)
    halves = {True: state(), False: without}
    return Watching(switch, settle=lambda: session.flush(LONGEST_S))


def by_traceml(folder: Path, rank: int) -> Watching:
    """Its patches and threads are there in the other half too, so it costs no less than the difference."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    tool = importlib.import_module("traceml_ai")
    port = int(os.environ[PORT])
    tool.init(
        aggregator_port=port,
        logs_dir=str(folder),
        session_id=SESSION,
        ui_mode="summary",
        on_missing_aggregator="raise",
        connect_timeout_sec=60,
    )
    return Watching(lambda _on: None, step=tool.trace_step)


def by_nvrx(_folder: Path, _rank: int) -> Watching:
    """A section around each step, as its documentation has it, without CUDA; its report, once a minute, is in neither half."""
    for folder in importlib.import_module("nvidia.cuda_cupti").__path__:  # it is loaded even where there is no GPU
        ctypes.CDLL(str(Path(folder) / "lib" / "libcupti.so.12"))
    detector = importlib.import_module("nvidia_resiliency_ext.straggler").Detector
    detector.initialize()
    return Watching(lambda _on: None, step=lambda _model: detector.detection_section("step", profile_cuda=False))


TOOLS = {"unskew": by_unskew, "traceml": by_traceml, "nvrx": by_nvrx}


def main(folder: Path, turns: int, tool: str, job: LoopSize) -> None:
    """Two ranks, forked from this process."""
    for name in ("torch.distributed", "torch._dynamo"):  # once for both; DDP imports the second
        importlib.import_module(name)
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:
                _rank(folder, rank, tool, job, turns)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        pids.append(pid)
    failed = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(failed):
        sys.exit(1)


def _rank(folder: Path, rank: int, tool: str, job: LoopSize, turns: int) -> None:
    import torch  # noqa: PLC0415 - here alone
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, IterableDataset  # noqa: PLC0415

    class RandomRows(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.ones(job.batch, job.width)

    watching = TOOLS[tool](folder, rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    layers = (torch.nn.Linear(job.width, job.width) for _ in range(job.layers))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(DataLoader(RandomRows(), batch_size=None))

    def step(*, on: bool) -> float:
        began_s = time.perf_counter()
        with watching.step(model) if on else nullcontext():
            for last in [False] * (job.micro_batches - 1) + [True]:
                with nullcontext() if last else model.no_sync():
                    model(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began_s

    def half(*, on: bool) -> Turn:
        watching.switch(on)
        _, before_s = [step(on=on) for _ in range(SKIPPED)], time.process_time()
        times = [step(on=on) for _ in range(job.steps)]
        if on:
            watching.settle()
        return (time.process_time() - before_s) / job.steps, median(times)

    pairs = []
    for turn in range(turns + 1):  # the first is a start's
        order = (True, False) if turn % 2 else (False, True)
        found = {on: half(on=on) for on in order}
        pairs.append((found[True], found[False]))
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(pairs[1:]))
    # Without destroy_process_group: it holds Python while Gloo's thread ends, which may be waiting for Python, for ever.


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], LoopSize(*map(int, sys.argv[4:])))
