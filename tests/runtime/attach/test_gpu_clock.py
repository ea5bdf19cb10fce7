"""A loop on a GPU: its parts wait until the GPU has been through them, and have the GPU's times then.

The GPU is a stand-in here (a stream whose work takes as long as a test says); on a real one the clock is measured by
`unskew bench gpu`.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.training.virtual_loop import VirtualClock

from unskew.collector.events import IterationCommitted, Span, Telemetry
from unskew.collector.paths import Store
from unskew.runtime.attach import seams
from unskew.runtime.attach.clocks import gpu
from unskew.runtime.attach.session import JobFacts, LoopSession
from unskew.runtime.attach.timeline import LoopTimeline

MS = 1_000_000


class Stream:
    """Executes what is launched, one after the other; `clock` is the host's."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.free_ns, self.events = clock, 0, 0
        self.broken = self.capturing = False

    def launch(self, ms: int) -> None:
        self.free_ns = max(self.free_ns, self.clock.ns) + ms * MS

    def event(self, **_: object) -> Event:
        self.events += 1
        return Event()

    def idle(self) -> None:
        self.clock.ns = max(self.clock.ns, self.free_ns)


class Event:
    def record(self, stream: Stream) -> None:
        if stream.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.stream, self.at_ns = stream, max(stream.free_ns, stream.clock.ns)

    def query(self) -> bool:
        return self.at_ns <= self.stream.clock.ns

    def elapsed_time(self, other: Event) -> float:
        return (other.at_ns - self.at_ns) / MS


class Gpu:
    """A loop on a stand-in; `current`: the stream that is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
        self.host, self.events = VirtualClock(), list[Telemetry]()
        self.stream = self.current = Stream(self.host)
        names: dict[str, Any] = {
            "Event": self.stream.event, "current_stream": lambda _: self.current,
            "is_current_stream_capturing": lambda: self.current.capturing,
        }  # fmt: skip
        for name, stand_in in names.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(gpu, "monotonic_ns", self.host.now)
        self.clock = gpu.StreamClock(0, lambda part: self.events.extend(part.events()))
        clock = self.clock
        self.timeline = LoopTimeline(0, ranks, "n:0", clock.take, ready=lambda: 0, now=clock.now, waits=clock.waited)

    def finish(self) -> None:
        self.timeline.finish()
        self.stream.idle()
        self.clock.finish(0.0)

    def ms(self, kind: str) -> list[int]:
        return [round(one.wall_us / 1_000) for one in self.events if isinstance(one, Span) and one.kind == kind]

    def iterations_ms(self) -> list[int]:
        return [round(one.wall_us / 1_000) for one in self.events if isinstance(one, IterationCommitted)]


def test_passes_take_what_the_gpu_takes_and_waits_what_its_stream_stands_still_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Gpu(monkeypatch, ranks=2)
    timeline, launches = of.timeline, list[int]()
    for _ in range(3):
        launches.append(of.host.ns)
        timeline.loading()
        timeline.loaded(torch.zeros(2, 5, dtype=torch.long))
        of.stream.launch(10)
        of.host.work(1)  # the host is far ahead of the GPU
        timeline.backward(None)
        of.stream.launch(20)
        timeline.computed()
        before = timeline.wait()
        of.stream.launch(5)  # the stream, and nobody else, waits for the others
        timeline.waited(*before)
        timeline.returned()
        timeline.stepping()
        of.stream.launch(3)
        timeline.stepped()
    assert launches == [0, MS, 2 * MS]
    assert of.events == []  # nothing has been computed yet
    of.finish()
    spans = [one for one in of.events if isinstance(one, Span)]
    assert [(one.kind, one.wall_us, one.compute_us, one.wait_dp_us) for one in spans if one.iteration == 1] == [
        ("data_wait", 0, 0, None),
        ("F", 10_000, 10_000, None),
        ("B", 20_000, 20_000, None),
        ("all_reduce", 5_000, None, 5_000),
        ("optimizer", 3_000, 3_000, None),
        ("other", 0, 0, None),
    ]
    assert [one.start_us for one in spans if one.kind == "F"] == [0, 38_000, 76_000]
    assert of.iterations_ms() == [38, 38, 38]


def test_a_late_host_shows_in_the_pass_that_it_is_late_in(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Gpu(monkeypatch)
    for _ in range(2):
        of.timeline.loading()
        of.timeline.loaded(None)
        of.host.work(30)
        of.stream.launch(10)
        of.timeline.backward(None)
        of.timeline.returned()
        of.timeline.stepping()
        of.timeline.stepped()
        of.stream.idle()
    of.finish()
    assert of.ms("F") == [40, 40]


def test_an_iteration_in_many_parts_lasts_as_long_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one is handed on in parts of 250 ms."""
    of = Gpu(monkeypatch)
    for _ in range(3):
        of.timeline.entered()
        for _ in range(8):
            of.stream.launch(100)
            of.timeline.backward(None)
            of.stream.launch(200)
            of.timeline.returned()
            of.stream.idle()
        of.timeline.left()
    of.finish()
    assert of.iterations_ms() == [2_400] * 3
    assert set(of.ms("B")) == {200}


def test_moments_on_other_streams_and_in_graphs_count_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of its own waits there for others, hidden behind what the loop computes; a captured step has no events."""
    of = Gpu(monkeypatch, ranks=2)
    side = Stream(of.host)
    for step in range(6):
        of.stream.capturing = step == 3
        of.timeline.entered()
        of.stream.launch(10)
        of.current = side
        before = of.timeline.wait()
        side.launch(90)
        of.timeline.waited(*before)
        of.current = of.stream
        of.clock.adopt()
        of.timeline.backward(None)
        of.stream.launch(20)
        of.timeline.returned()
        of.timeline.left()
        of.stream.idle()
    of.finish()
    steps = [one for one in of.events if isinstance(one, Span) and one.kind == "F"]
    assert [(round(one.wall_us / 1_000), one.wait_dp_us) for one in steps if one.iteration not in {3, 4}] == [(10, None)] * 4
    assert of.ms("F")[3] == 0
    assert sum(of.iterations_ms()) == 180


def test_what_is_collected_within_a_moment_is_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Gpu(monkeypatch)
    record, seen = Event.record, list[int]()

    def collecting(event: Event, stream: Stream) -> None:
        seen.append(of.clock.now())  # as a collection that `record` itself sets off
        record(event, stream)

    monkeypatch.setattr(Event, "record", collecting)
    moments = [of.clock.now() for _ in range(5)]
    assert seen == moments == sorted(set(moments))


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Gpu(monkeypatch)
    for _ in range(200):
        of.timeline.entered()
        of.timeline.backward(None)
        of.stream.launch(1)
        of.timeline.returned()
        of.timeline.left()
        of.stream.idle()
    of.finish()
    assert len(of.iterations_ms()) == 200
    assert of.stream.events < 30


def test_an_error_of_the_gpu_ends_the_measuring_and_not_the_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An event reports errors of kernels before it; a loop that handles its own must see its own."""
    of = Gpu(monkeypatch)
    session = LoopSession(Store(tmp_path), "run", lambda: JobFacts(0, 1, (), on_gpu=True))
    session.timeline = of.timeline

    def fails() -> None:
        raise ValueError("the loop's own")

    of.stream.broken = True
    with pytest.raises(ValueError, match="the loop's own"):
        seams._waiting(session)(fails)()
    assert not session.active
    assert "training goes on: RuntimeError: CUDA error" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU: torch sees none here")
def test_a_real_gpu_is_timed_by_itself() -> None:
    parts: list[Telemetry] = []
    clock = gpu.StreamClock(0, lambda part: parts.extend(part.events()))
    timeline = LoopTimeline(0, 1, "n:0", clock.take, ready=lambda: 0, now=clock.now, waits=clock.waited)
    matrix = torch.ones(8192, 8192, device="cuda")

    def products() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    products()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    products()
    torch.cuda.synchronize()
    own_us = 1e6 * (time.perf_counter() - began_s)
    for _ in range(5):
        timeline.entered()
        products()
        timeline.backward(None)
        timeline.returned()
        timeline.left()
    timeline.finish()
    clock.finish(10.0)
    found = [one.wall_us for one in parts if isinstance(one, Span) and one.kind == "F" and one.iteration > 1]
    assert median(found) == pytest.approx(own_us, rel=0.1)
