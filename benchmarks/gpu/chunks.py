"""What is measured on a GPU without a run: chunks of one rank by CUDA events, what a span costs, and sums by NCCL.

Each function runs in a process of its own (at_hand.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.workload import work_of
from unskew.benchmarks.loop.overhead import instrumented_chunk_us
from unskew.runtime.model.model import build_layer
from unskew.runtime.rank.device import ChunkOf, ChunkTiming, CudaDevice
from unskew.runtime.size import ModelSize

SIZE = ModelSize(n_layers=4, dim=2048, heads=16)
MIDDLE = (1, 2)
"""Layers without embedding and head, 50 million parameters each."""
WARM, REPEATS = 1, 4
SUMS = 30


class LengthTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one micro-batch with documents of these lengths: each repetition's forward and backward, in microseconds."""

    lengths: tuple[int, ...]
    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]

    @property
    def chunks(self) -> list[Chunk]:
        """As the predictor takes them."""
        kinds = {"F": self.forward_us, "B": self.backward_us}
        return [
            Chunk(rank=0, kind=kind, n_layers=len(MIDDLE), has_head=False, work=work_of(self.lengths), us=us)
            for kind, times in kinds.items()
            for us in times
        ]


def times_of(micro_batches: Sequence[tuple[int, ...]], size: ModelSize = SIZE) -> list[LengthTimes]:
    """Two layers, forward and backward, as a rank times its chunks."""
    device = CudaDevice([], 0)
    layers = [build_layer(size, number, seed=0, dtype=torch.float32, device=device.torch_device) for number in MIDDLE]
    found = []
    for lengths in micro_batches:
        timed = [_passes(device, layers, lengths, size.dim) for _ in range(WARM + REPEATS)][WARM:]
        one = LengthTimes(
            lengths=lengths,
            forward_us=tuple(forward.compute_us for forward, _ in timed),
            backward_us=tuple(backward.compute_us for _, backward in timed),
        )
        found.append(one)
        named = f"{len(lengths)} x {lengths[0]}"
        took = f"F {median(one.forward_us) / 1e3:.2f} ms, B {median(one.backward_us) / 1e3:.2f} ms"
        print(f"{time.strftime('%X')} documents of {named} tokens: {took}", flush=True)
    return found


def _passes(device: CudaDevice, layers: Sequence[torch.nn.Module], lengths: tuple[int, ...], dim: int) -> list[ChunkTiming]:
    x = torch.randn(sum(lengths), dim, device=device.torch_device).requires_grad_(True)
    dy = torch.randn_like(x)
    work = work_of(lengths)
    given: list[Tensor] = []

    def forward() -> Tensor:
        y: Tensor = x
        for layer in layers:
            y = layer(y, lengths)
        given.append(y)
        return y

    def backward() -> Tensor:
        torch.autograd.backward(given.pop(), dy)
        return dy

    device.drain()
    timings = [
        device.run(ChunkOf(kind, 0, len(layers), False, work, 0), body)[1] for kind, body in (("F", forward), ("B", backward))
    ]
    device.drain()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return [timing() for timing in timings]


def span_us() -> float:
    """CPU time of a chunk that is timed by events and goes to the log, beside its own work."""
    return instrumented_chunk_us(CudaDevice([], 0))


class SumTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a sum of so many bytes, medians: what the stream waits for it at once, and after work that hides it; and
    how long the same bytes take to the host and back."""

    n_bytes: int
    alone_ms: float
    beside_ms: float
    work_ms: float
    to_host_ms: float
    from_host_ms: float


def sums_by_nccl(sizes: Sequence[int]) -> list[SumTimes]:
    """All-reduces of a group of one rank, by events around `Work.wait`."""
    from torch import distributed  # noqa: PLC0415 - only here

    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    matrix = torch.full((4096, 4096), 0.5, device="cuda")
    found = []
    for size in sizes:
        flat = torch.ones(size // 4, device="cuda")
        host = torch.empty(size // 4)
        found.append(
            SumTimes(
                n_bytes=size,
                alone_ms=_exposed_ms(flat, lambda: None),
                beside_ms=_exposed_ms(flat, lambda: matrix @ matrix),
                work_ms=_took_ms(lambda: matrix @ matrix),
                to_host_ms=_took_ms(partial(host.copy_, flat)),
                from_host_ms=_took_ms(partial(flat.copy_, host)),
            )
        )
    distributed.destroy_process_group()
    return found


def _exposed_ms(flat: Tensor, work: Callable[[], object]) -> float:
    """How long the stream waits for a sum when it has done `work` that was launched behind it."""
    from torch import distributed  # noqa: PLC0415

    waited = []
    for _ in range(SUMS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        pending = distributed.all_reduce(flat, async_op=True)
        work()
        begin.record()
        pending.wait()
        end.record()
        torch.cuda.synchronize()
        waited.append(begin.elapsed_time(end))
    return float(median(waited[SUMS // 3 :]))


def _took_ms(work: Callable[[], object]) -> float:
    """The host's time until the GPU is through with it."""
    took = []
    for _ in range(SUMS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    return median(took[SUMS // 3 :])
