"""What executes a chunk and which clock times it.

One executor runs on four devices; only this object differs:

* `RealDevice`: the CPU core this rank has. Chunk time = wall clock minus the time the thread was runnable without a core, and
  minus what it waited for the other members of its tensor-parallel group.
* `CudaDevice`: a GPU, its own or one that it shares with other ranks. Chunk time by CUDA events (runtime/gpu_clock.py), read
  after the iteration so that nothing waits for them; what other ranks computed on the GPU meanwhile is part of it.
* `SleepDevice`: real maths, then sleep until the profile's time is up, on a clock of the device's own: like a GPU whose work
  was launched ahead, it begins a chunk when the last one's time was up and the input there, however late its process woke.
  Chunk time = the profile's, or the wall clock without the time the thread was runnable without a core, if that is longer.
* `VirtualDevice`: a logical clock that messages carry along: exact, and independent of load.

A chunk of a tensor-parallel group lasts until its slowest member is done: what the others wait is none of their own time.

A slow fault multiplies the chunk's time: by sleeping in proportion to the CPU time used (real), by a longer sleep, or on the
clock. One in memory multiplies the part that waits for memory, weights and attention (emulated); on a CPU core it reads memory
in proportion, so that who shares the memory feels it, too.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.workload import Work
from unskew.collector.events import Fault, SlowPart
from unskew.runtime.gpu_clock import GpuClock
from unskew.runtime.protocol import RankSpec
from unskew.runtime.rank.comm import PeerLost


class ChunkTiming(msgspec.Struct, gc=False):
    """When a chunk ran, in the run's clock, and its own time; `wait_tp_us`: what it waited for the other members of a
    tensor-parallel group; `cpu_us`: for how long it worked on a core that is shared; `idle_us`: for how long the device had
    had nothing to do. None = not measured, or alone."""

    start_us: int
    wall_us: int
    compute_us: int
    runq_us: int | None = None
    wait_tp_us: int | None = None
    cpu_us: int | None = None
    idle_us: int | None = None


class Members(Protocol):
    """The tensor-parallel group that executes a chunk together; `blocked_ns`: how long this rank has waited for it in all,
    `priced_us`: how long emulated devices are to take for what they exchanged."""

    blocked_ns: int
    priced_us: float

    def gather_unpriced(self, tensor: Tensor) -> Tensor:
        """All members' tensors, without a price: [member, ...]."""


class ChunkOf(msgspec.Struct, frozen=True, gc=False):
    """What the device must know of a chunk to time it or to make it slow; its inputs had arrived at `ready_us`; `split`: B is
    the gradient of activations alone; `share`: how much of its layers this rank has; `again`: it executes the forward once
    more."""

    kind: str
    iteration: int
    n_layers: float
    has_head: bool
    work: Work
    ready_us: int
    split: bool = False
    share: float = 1.0
    again: bool = False


class Device(ABC):
    """Runs chunks and has a clock. `torch_device` is where the tensors live; `emulated`: it takes the time of a profile;
    `carries_time`: messages carry the clock; `clock_ns`: for how long it has worked, where that tells layers of a chunk apart.
    """

    torch_device = torch.device("cpu")
    clock_ns: Callable[[], int] | None = None
    emulated = False
    carries_time = False

    def __init__(self, slow: Sequence[Fault]) -> None:
        self._slow = slow

    @abstractmethod
    def run(
        self, chunk: ChunkOf, body: Callable[[], Tensor], team: Members | None = None
    ) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        """Execute `body`, with the other members of a `team`; the timing is asked for after the iteration."""

    def now_us(self) -> int:
        """The run's clock."""
        return time.monotonic_ns() // 1000

    def ended_us(self) -> int:
        """When the last chunk ended, by the device's own clock."""
        return self.now_us()

    def drain(self) -> None:  # noqa: B027 - only where work is launched ahead there is any left
        """Wait until all that was launched is through."""

    def wait_until(self, time_us: int) -> None:
        """Begin nothing before."""
        time.sleep(max(time_us - self.now_us(), 0) / 1e6)

    def advance_to(self, time_us: int) -> None:  # noqa: B027 - only a logical clock listens
        """The iteration ended at `time_us` on the slowest rank."""

    def _factor(self, chunk: ChunkOf, *of: SlowPart) -> float:
        """How many times longer it takes for its faults, those in some parts of it or, without `of`, all."""
        return prod(fault.slowdown(chunk.kind, chunk.iteration) for fault in self._slow if fault.of in of or not of)

    def _slowed_us(self, cost: CostModel, chunk: ChunkOf) -> float:
        """What an emulated device of this cost takes."""
        us = _emulated_us(cost, chunk, chunk.work) * self._factor(chunk, "compute")
        if (more := self._factor(chunk, "memory") - 1.0) > 0.0:
            us += more * _emulated_us(cost, chunk, Work(0, chunk.work.sum_sq))  # all but the products with weights
        return us


class _RunQueue:
    """How long this thread was runnable without a core: the kernel's count, which exists on Linux only."""

    def __init__(self) -> None:
        try:
            self._schedstat: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._schedstat = None

    def waited_ns(self) -> int | None:
        """Since the thread began; None = unknown."""
        return None if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1])

    def waited_since_ns(self, before_ns: int | None) -> int | None:
        """Since `waited_ns` gave `before_ns`; None = unknown."""
        now_ns = self.waited_ns()
        return None if before_ns is None or now_ns is None else now_ns - before_ns


class RealDevice(Device):
    clock_ns = staticmethod(time.thread_time_ns)

    def __init__(self, slow: Sequence[Fault]) -> None:
        super().__init__(slow)
        self._queue = _RunQueue()

    def run(
        self, chunk: ChunkOf, body: Callable[[], Tensor], team: Members | None = None
    ) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        start, runq, cpu, blocked = time.monotonic_ns(), self._queue.waited_ns(), time.thread_time_ns(), _blocked_ns(team)
        result = body()
        used_ns = time.thread_time_ns() - cpu
        if (more := self._factor(chunk, "compute") - 1.0) > 0.0:
            time.sleep(more * used_ns / 1e9)
        if (more := self._factor(chunk, "memory") - 1.0) > 0.0:
            _read_memory(int(more * used_ns))
        wall, waited = time.monotonic_ns() - start, self._queue.waited_since_ns(runq)
        timing = ChunkTiming(
            start_us=start // 1000,
            wall_us=wall // 1000,
            compute_us=max(wall - (waited or 0) - (blocked := _blocked_ns(team) - blocked), 0) // 1000,
            runq_us=None if waited is None else waited // 1000,
            wait_tp_us=None if team is None else blocked // 1000,
            cpu_us=(time.thread_time_ns() - cpu) // 1000,
        )
        return result, lambda: timing


def _blocked_ns(team: Members | None) -> int:
    return 0 if team is None else team.blocked_ns


def _priced_us(team: Members | None) -> float:
    return 0.0 if team is None else team.priced_us


def _together(team: Members, start: int, length: int) -> tuple[int, int]:
    """When all members of a team had begun a chunk, and how long the slowest took. Where one is gone only this one's own are
    known; the chunk is executed, and whatever comes next breaks."""
    with suppress(PeerLost):
        start, length = team.gather_unpriced(torch.tensor([start, length])).amax(dim=0).tolist()
    return start, length


def _read_memory(ns: int) -> None:
    """Copy more than caches hold, again and again, for so much of the thread's time."""
    until, there = time.thread_time_ns() + ns, torch.empty(_MORE_THAN_CACHES)
    while time.thread_time_ns() < until:
        there.add_(1.0)


class CudaDevice(Device):
    def __init__(self, slow: Sequence[Fault], index: int) -> None:
        super().__init__(slow)
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)  # events and generators are of the current one
        _load_libraries(self.torch_device)
        self._clock = GpuClock(_timed_event, torch.cuda.synchronize)
        self._ended = self._clock.moment()

    def run(
        self, chunk: ChunkOf, body: Callable[[], Tensor], team: Members | None = None
    ) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        before, begin, blocked = self._ended, self._clock.moment(), _blocked_ns(team)
        result = body()
        waited_us = (_blocked_ns(team) - blocked) // 1000
        if (factor := self._factor(chunk)) > 1.0:
            time.sleep((factor - 1.0) * (self._clock.moment().us() - begin.us()) / 1e6)
        end = self._ended = self._clock.moment()

        def timing() -> ChunkTiming:
            start_us, wall_us = begin.us(), end.us() - begin.us()
            return ChunkTiming(
                start_us=start_us,
                wall_us=wall_us,
                compute_us=max(wall_us - waited_us, 0),
                wait_tp_us=None if team is None else waited_us,
                idle_us=max(start_us - before.us(), 0),
            )

        return result, timing

    def ended_us(self) -> int:
        """Waits for it: only the GPU knows."""
        return self._ended.us()

    def drain(self) -> None:
        self._clock.drain()
        self._ended = self._clock.moment()


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _load_libraries(device: torch.device) -> None:
    """The first product and the first backward pass load what they need: now, while nobody waits for this rank."""
    matrix = torch.ones((8, 8), device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


_MORE_THAN_CACHES = 4 << 20
"""Elements; a pass over them takes some milliseconds."""
CATCH_UP_NS = 100_000_000
"""The most by which a chunk begins before its process is there to execute it; an iteration that is redone begins anew."""


class SleepDevice(Device):
    emulated = True

    def __init__(self, slow: Sequence[Fault], cost: CostModel) -> None:
        super().__init__(slow)
        self._cost = cost
        self._queue = _RunQueue()
        self._free_ns, self._iteration = 0, -1

    def run(
        self, chunk: ChunkOf, body: Callable[[], Tensor], team: Members | None = None
    ) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        here, runq = time.monotonic_ns(), self._queue.waited_ns()
        start = here
        if chunk.iteration == self._iteration:
            start = min(here, max(self._free_ns, 1000 * chunk.ready_us, here - CATCH_UP_NS))
        length, blocked, priced_us = int(1000 * self._slowed_us(self._cost, chunk)), _blocked_ns(team), _priced_us(team)
        result = body()
        time.sleep(max(start + length - time.monotonic_ns(), 0) / 1e9)
        wall, waited = time.monotonic_ns() - here, self._queue.waited_since_ns(runq)
        spent = max(length, wall - (waited or 0) - (_blocked_ns(team) - blocked))
        together = spent
        if team is not None:
            start, together = _together(team, start, spent)
            together += int(1000 * (_priced_us(team) - priced_us))
            time.sleep(max(start + together - time.monotonic_ns(), 0) / 1e9)
        self._free_ns, self._iteration = start + together, chunk.iteration
        timing = ChunkTiming(
            start_us=start // 1000,
            wall_us=together // 1000,
            compute_us=spent // 1000,
            runq_us=None if waited is None else waited // 1000,
            wait_tp_us=None if team is None else (together - spent) // 1000,
        )
        return result, lambda: timing

    def ended_us(self) -> int:
        return self._free_ns // 1000

    def wait_until(self, time_us: int) -> None:
        super().wait_until(time_us)
        self._free_ns = max(self._free_ns, 1000 * time_us)


class VirtualDevice(Device):
    emulated = True
    carries_time = True

    def __init__(self, slow: Sequence[Fault], cost: CostModel) -> None:
        super().__init__(slow)
        self._cost = cost
        self._now_us = 0

    def run(
        self, chunk: ChunkOf, body: Callable[[], Tensor], team: Members | None = None
    ) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        priced_us = _priced_us(team)
        result = body()
        start = max(self._now_us, chunk.ready_us)
        length = together = round(self._slowed_us(self._cost, chunk))
        if team is not None:
            start, together = _together(team, start, length)
            together += round(_priced_us(team) - priced_us)
        self._now_us = start + together
        timing = ChunkTiming(start, together, length, wait_tp_us=None if team is None else together - length)
        return result, lambda: timing

    def now_us(self) -> int:
        return self._now_us

    def wait_until(self, time_us: int) -> None:
        self.advance_to(time_us)

    def advance_to(self, time_us: int) -> None:
        self._now_us = max(self._now_us, time_us)


def _emulated_us(cost: CostModel, chunk: ChunkOf, work: Work) -> float:
    model = cost.split if chunk.split else cost.joined
    us = model.chunk_us(chunk.kind, work, chunk.n_layers, has_head=chunk.has_head, again=chunk.again)
    return us * chunk.share


def make_device(rank_spec: RankSpec) -> Device:
    """The device of a rank, with the slow faults that are meant for it; an emulated one is of the class that its profile
    names."""
    slow = [fault for fault in rank_spec.options.faults if fault.kind == "slow" and fault.rank == rank_spec.rank]
    if rank_spec.device == "sleep":
        return SleepDevice(slow, profile(rank_spec.device_class))
    if rank_spec.device == "virtual":
        return VirtualDevice(slow, profile(rank_spec.device_class))
    return RealDevice(slow) if rank_spec.gpu is None else CudaDevice(slow, rank_spec.gpu)
