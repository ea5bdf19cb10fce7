"""The devices that take real time: a slow rank is named, and the plan that follows is predicted well."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.training.runtime_runs import train

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.workload import Work
from unskew.collector.events import RunFinished, Verdict
from unskew.runtime.rank.device import ChunkOf, SleepDevice

pytestmark = [pytest.mark.limit(120), pytest.mark.alone]


def test_on_the_real_device_a_slow_rank_is_named(tmp_path: Path) -> None:
    run = train(
        tmp_path, "slow:rank=1,factor=3,at=14", device="real", pp=2, dp=1, dim=64, heads=2, tokens=256, iterations=60,
        dtype="float32",
    )  # fmt: skip
    assert run.of(RunFinished)[-1].status == "done"
    verdict, *others = run.of(Verdict)
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("slow_device", [1])
    # Sixteen slow iterations are asked of cores that other programs share, more while the healthy rank's time varies as well.
    assert 14 <= verdict.at_iteration < 40
    assert {other.verdict for other in others} <= {verdict.verdict}
    assert 0.2 < verdict.speed["F"] < 0.5


def sleeping(cost: CostModel) -> SleepDevice:
    return SleepDevice([], cost)


def test_a_sleeping_device_does_not_lose_time_because_its_process_wakes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake-up comes 8 ms late: six chunks of 20 ms that wait for nothing still take 120 ms, and the last wake-up."""
    device = sleeping(CostModel(chunks={"F": ChunkCost(layer_us=20_000.0, token_us=0.0, token2_us=0.0)}))
    sleep = time.sleep
    monkeypatch.setattr("unskew.runtime.rank.device.time.sleep", lambda seconds: sleep(seconds + 0.008))
    begun, timings = time.monotonic(), []
    for _ in range(6):
        timings.append(device.run(ChunkOf("F", 0, 1, False, Work(10, 100), 0), lambda: torch.empty(0))[1]())
    spent_s = time.monotonic() - begun
    monkeypatch.undo()
    assert spent_s >= 0.12
    own_s = sum(timing.compute_us for timing in timings) / 1e6
    assert spent_s - own_s < 0.02  # where a core was to be had; what it had not, is in compute_us or in the last wake-up
    for one, following in pairwise(timings):
        assert following.start_us >= one.start_us + one.wall_us - 1


def test_a_sleeping_device_waits_for_its_input_and_begins_each_iteration_anew() -> None:
    device = sleeping(CostModel(chunks={"F": ChunkCost(layer_us=5_000.0, token_us=0.0, token2_us=0.0)}))

    def start_us(iteration: int, ready_us: int) -> int:
        chunk = ChunkOf("F", iteration, 1, False, Work(10, 100), ready_us)
        return device.run(chunk, lambda: torch.empty(0))[1]().start_us

    start_us(0, 0)
    time.sleep(0.03)
    ready_us = device.now_us() - 10_000
    assert start_us(0, ready_us) == ready_us  # it came 10 ms ago, 20 ms after the device was free
    time.sleep(0.03)
    here_us = device.now_us()
    assert start_us(1, 0) >= here_us
