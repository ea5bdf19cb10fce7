"""How long a vote waits for the log, and what is recorded of chunks and of a device's product."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unskew.analytics.health.probing import measured
from unskew.analytics.pipeline.actions import Action
from unskew.collector.events import Span
from unskew.runtime.rank.device import ChunkOf, ChunkTiming
from unskew.runtime.rank.executor import ExecutedChunk, ExecutedWork
from unskew.runtime.rank.probe import product_us
from unskew.runtime.rank.recorder import PATIENCE_S, SHORT_PATIENCE_S, Recorder


class Disk:
    """Takes the log in time or not, and remembers how long it was waited for."""

    def __init__(self) -> None:
        self.in_time = True
        self.waited_s: list[float] = []
        self.spans: list[Span] = []

    def append(self, span: Span) -> None:
        self.spans.append(span)

    def hand_over(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self.in_time


def recorder_on(disk: Disk) -> Recorder:
    spec: Any = SimpleNamespace(options=SimpleNamespace(instrument_turns=0), device_id="node:0", rank=0)
    spool: Any = disk
    return Recorder(spool, SimpleNamespace(), spec)  # type: ignore[arg-type]


def begin(recorder: Recorder, iteration: int) -> None:
    plan: Any = SimpleNamespace(plan_version=0)
    recorder.begin(plan, iteration, 0)


def test_a_stalled_disk_costs_the_long_wait_once() -> None:
    disk = Disk()
    recorder = recorder_on(disk)
    for iteration, disk.in_time in enumerate((True, False, False, True, True)):
        begin(recorder, iteration)
        assert recorder.hand_over() is disk.in_time
    assert disk.waited_s == [PATIENCE_S, PATIENCE_S, SHORT_PATIENCE_S, SHORT_PATIENCE_S, PATIENCE_S]


def test_what_was_missing_before_a_sum_is_missing_in_the_vote() -> None:
    """The spool counts what it dropped until it is asked, and an attempt asks before each sum that begins early."""
    disk = Disk()
    recorder = recorder_on(disk)
    begin(recorder, 0)
    for disk.in_time, complete in ((True, True), (False, False), (True, False)):
        assert recorder.hand_over() is complete
    begin(recorder, 1)
    assert recorder.hand_over()


@pytest.mark.parametrize(("idle_us", "waited_us"), [(None, 700), (200, 200), (900, 700)])
def test_a_device_has_not_waited_while_it_still_computed(idle_us: int | None, waited_us: int) -> None:
    """The host, which launches work ahead, waits for a message 700 us long."""
    disk = Disk()
    recorder = recorder_on(disk)
    begin(recorder, 0)
    timing = ChunkTiming(start_us=5, wall_us=10, compute_us=10, idle_us=idle_us)
    action = Action(kind="F", micro_batch=0, hop=0, rank=0, first_layer=0, n_layers=1)
    recorder.chunks(ExecutedWork(chunks=[ExecutedChunk(action, lambda: timing, 700, [])]))
    assert [span.wait_pp_us for span in disk.spans] == [waited_us]


@pytest.mark.parametrize(("taken_us", "product", "warm_us", "made"), [
    ([500] * 10 + [200] * 90, 200, 10_000, 9),  # the first products of a process take longer
    ([1_100_000] * 9, 1_100_000, 1_100_000, 3),  # a rank may not be silent for long
])  # fmt: skip
def test_a_product_is_timed_once_the_device_is_warm(taken_us: list[int], product: int, warm_us: int, made: int) -> None:
    """Against a reference that was taken cold a slow device looked healthy on standby. Waiting for a core warms nothing: a
    product takes 12 ms more by the wall clock."""
    clock, left = [0], list(taken_us)

    def run(_chunk: ChunkOf, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], ChunkTiming]]:
        start, us = clock[0], left.pop(0)
        clock[0] += us + 12_000
        timing = ChunkTiming(start_us=start, wall_us=us + 12_000, compute_us=us, runq_us=12_000, cpu_us=us)
        return body(), lambda: timing

    cpu = torch.device("cpu")
    device: Any = SimpleNamespace(
        torch_device=cpu, emulated=False, drain=lambda: None, now_us=lambda: clock[0], run=run
    )  # fmt: skip
    disk = Disk()
    recorder = recorder_on(disk)
    begin(recorder, 0)
    assert product_us(3, 0, device, recorder) == product
    warm, *timed = disk.spans
    assert (warm.compute_us, [span.compute_us for span in timed]) == (None, [product] * made)
    assert sum(taken_us[: len(taken_us) - len(left) - made]) >= warm_us
    assert measured(disk.spans, {0: 100.0}).cost_us == clock[0]
