"""A chunk on a GPU begins when the GPU begins it. The GPU is a stand-in: what is launched takes its time, in turn."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from unskew.analytics.core.workload import Work
from unskew.collector.events import Fault
from unskew.runtime.gpu_clock import NARROW_NS, TRIES, GpuClock
from unskew.runtime.rank import device
from unskew.runtime.rank.device import ChunkOf, CudaDevice


class Gpu:
    """The host's clock stands still but where it waits, or works for `host`."""

    def __init__(self) -> None:
        self.now_ns = self.free_ns = 1_000_000_000
        self.events: list[Event] = []
        self.turns_ns = [0] * 100

    def launch(self, us: int) -> None:
        self.free_ns = max(self.free_ns, self.now_ns) + 1000 * us

    def host(self, us: float) -> None:
        self.now_ns += round(1000 * us)

    def wait(self) -> None:
        self.now_ns = max(self.now_ns, self.free_ns)

    def event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    """What torch.cuda.Event does; on an idle stream it comes about when it is this process's turn."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.at_ns = gpu, 0

    def record(self) -> None:
        idle = self._gpu.free_ns <= self._gpu.now_ns
        self.at_ns = max(self._gpu.free_ns, self._gpu.now_ns) + (self._gpu.turns_ns.pop(0) if idle else 0)

    def synchronize(self) -> None:
        self._gpu.now_ns = max(self._gpu.now_ns, self.at_ns)

    def elapsed_time(self, later: Event, /) -> float:
        assert max(self.at_ns, later.at_ns) <= self._gpu.now_ns, "not ready"
        return (later.at_ns - self.at_ns) / 1e6


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def clock_of(gpu: Gpu) -> GpuClock:
    return GpuClock(gpu.event, gpu.wait, lambda: gpu.now_ns)


def test_a_moment_is_when_what_was_launched_before_it_is_through(gpu: Gpu) -> None:
    clock = clock_of(gpu)
    gpu.launch(500)
    through, launched_ns = clock.moment(), gpu.now_ns
    assert gpu.now_ns == launched_ns, "nothing waited"
    assert through.us() == launched_ns // 1000 + 500


def test_events_are_used_again_once_they_are_read(gpu: Gpu) -> None:
    clock = clock_of(gpu)
    for _ in range(5):
        moments = [clock.moment() for _ in range(3)]
        gpu.launch(10)
        assert len({moment.us() for moment in moments}) == 1
        assert moments[0].us() == moments[0].us(), "asked again"
    assert len(gpu.events) == 1 + 3


def test_the_anchor_is_the_quicker_of_two_events(gpu: Gpu) -> None:
    """Others compute on the GPU, too, so that an event waits for its turn: 4 ms, then 1 ms."""
    gpu.turns_ns[:TRIES] = [4_000_000, 1_000_000]
    clock = clock_of(gpu)
    assert clock.moment().us() == pytest.approx(gpu.now_ns / 1000, abs=501)
    assert len(gpu.events) == TRIES + 1


def test_one_that_is_quick_enough_is_the_anchor(gpu: Gpu) -> None:
    gpu.turns_ns[0] = NARROW_NS
    clock_of(gpu)
    assert len(gpu.events) == 1


@pytest.fixture
def on_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: gpu.event())
    monkeypatch.setattr(device, "_load_libraries", lambda _: None)
    monkeypatch.setattr(device, "GpuClock", partial(GpuClock, now_ns=lambda: gpu.now_ns))
    monkeypatch.setattr(device.time, "sleep", lambda seconds: gpu.host(1e6 * seconds))
    return gpu


def chunk(iteration: int = 0) -> ChunkOf:
    return ChunkOf("F", iteration, 1, False, Work(10, 100), 0)


def launching(gpu: Gpu, us: int) -> torch.Tensor:
    gpu.host(5)
    gpu.launch(us)
    return torch.empty(0)


def test_a_chunk_that_is_launched_ahead_begins_when_the_one_before_has_ended(on_gpu: Gpu) -> None:
    here = CudaDevice([], 0)
    begun_us = on_gpu.now_ns // 1000
    timings = [here.run(chunk(), partial(launching, on_gpu, us))[1] for us in (1_000, 3_000)]
    assert on_gpu.now_ns // 1000 == begun_us + 10, "the host has waited for neither"
    first, second = (timing() for timing in timings)
    # Launched after 5 us, so that the GPU was idle for as long, within the first chunk.
    assert (first.start_us, first.wall_us, first.idle_us) == (begun_us, 1_005, 0)
    assert (second.start_us, second.wall_us, second.idle_us) == (begun_us + 1_005, 3_000, 0)
    assert here.ended_us() == begun_us + 4_005


def test_how_long_the_gpu_had_nothing_to_do_is_known(on_gpu: Gpu) -> None:
    here = CudaDevice([], 0)
    timings = []
    for _ in range(2):
        timings.append(here.run(chunk(), partial(launching, on_gpu, 1_000))[1])
        on_gpu.host(1_700)  # for a message
    assert [timing().idle_us for timing in timings] == [0, 700]
    here.drain()
    on_gpu.host(40)
    assert here.run(chunk(), partial(launching, on_gpu, 10))[1]().idle_us == 40


def test_a_slow_fault_on_a_gpu_takes_as_many_times_as_long(on_gpu: Gpu) -> None:
    here = CudaDevice([Fault(kind="slow", rank=0, at_iteration=3, factor=2.5)], 0)
    took = [here.run(chunk(iteration), partial(launching, on_gpu, 995))[1]().wall_us for iteration in (2, 3)]
    assert took == [1_000, 2_500]
