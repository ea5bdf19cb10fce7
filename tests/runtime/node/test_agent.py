"""The agent and the zygote by themselves: what a controller that takes over is told, and a fork that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from unskew.analytics.core.faults import parse_faults
from unskew.collector.files.checkpoints import checkpoints
from unskew.collector.paths import Store
from unskew.runtime.node.agent import Agent
from unskew.runtime.node.checkpoints import CheckpointKeeper
from unskew.runtime.node.zygote import Zygote
from unskew.runtime.options import RunOptions
from unskew.runtime.protocol import CheckpointPart, FaultAnnounced, Joining, Message, RankSpec


def test_every_fault_that_was_announced_meanwhile_is_told_to_the_next_controller() -> None:
    agent = Agent.__new__(Agent)
    agent._reports, agent._controller = {}, None
    faults = parse_faults(["slow:rank=1,at=3,factor=2", "slow:rank=2,at=5,factor=2"], ranks=4, iterations=20)
    for fault in (*faults, faults[0]):
        agent._report(FaultAnnounced(fault=fault, iteration=fault.at_iteration, at_us=0))
    reported = [message.fault for message in agent._reports.values() if isinstance(message, FaultAnnounced)]
    assert sorted(one.rank for one in reported) == [1, 2]


def test_checkpoints_become_whole_while_there_is_no_controller(tmp_path: Path) -> None:
    """It is killed between two parts of one checkpoint; the next one is written without it."""
    agent, store = Agent.__new__(Agent), Store.locate(tmp_path)
    agent._reports, agent._controller, agent._wait_s = {}, Sent(), 30.0  # type: ignore[assignment]
    agent._checkpoints = CheckpointKeeper(store, "r", 2)
    for iterations in (4, 8):
        (store.checkpoints("r") / f"{iterations:08d}").mkdir(parents=True)
    agent._report(part(0, 4))
    agent._lose_controller("killed")
    agent._report(part(1, 4))
    assert [one.index.iterations for one in checkpoints(store, "r")] == [4]
    for rank in (1, 0):
        agent._report(part(rank, 8))
    assert [one.index.iterations for one in checkpoints(store, "r")] == [4, 8]


def part(rank: int, iterations: int) -> CheckpointPart:
    return CheckpointPart(rank=rank, iterations=iterations, layers=(rank,), bytes=10, seconds=0.5, paused_us=0)


class Sent:
    """What a zygote sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def test_a_process_that_cannot_be_started_for_a_lost_rank_ends_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> NoReturn:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    zygote = Zygote.__new__(Zygote)
    zygote._channel, zygote._writers, zygote._rank_of_pid = Sent(), set(), {}  # type: ignore[assignment]
    options = RunOptions(pp=2, dp=1)
    beside = RankSpec(
        run="r", rank=1, device_id="n:1", device_class="", writer="rank-0001.2", store=".", options=options, device="sleep",
        gpu=None, agent_folder=".", joins=Joining(plan=options.first_plan(), committed=3),
    )  # fmt: skip
    zygote._fork(beside)
    assert "no process could be started for rank 1: Resource temporarily unavailable" in capsys.readouterr().err
    assert (zygote._writers, zygote._rank_of_pid) == (set(), {})  # it can be asked for again
