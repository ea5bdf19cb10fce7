"""Controller, agent and zygote of a process that holds many files: its sockets get descriptors above 1,023."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest.mock import patch

import pytest
from support.training.runtime_runs import Run, train

from unskew.collector.events import DeviceLost, RunFinished
from unskew.runtime.channel import Channel, readable
from unskew.runtime.protocol import Kill

OF_SELECT = 1024
"""The first descriptor that `select.select` refuses."""
HOLDING = f"""
import os
for _ in range({OF_SELECT}): os.open(os.devnull, os.O_RDONLY)
from unskew.runtime.node.agent import main
main()
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(OF_SELECT)]
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def pairs(many_files: None) -> Iterator[list[tuple[socket.socket, socket.socket]]]:  # noqa: ARG001 - they come first
    pairs = [socket.socketpair() for _ in range(3)]
    assert min(one.fileno() for pair in pairs for one in pair) >= OF_SELECT
    yield pairs
    for pair in pairs:
        for one in pair:
            one.close()


def test_what_can_be_read_is_in_the_order_asked(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (one, to_one), (other, to_other), (silent, _) = pairs
    began = time.monotonic()
    assert readable([one, other, silent], 0.05) == []
    assert time.monotonic() >= began + 0.05
    Channel(to_other).send(Kill(rank=3))
    to_one.close()
    assert readable([silent, other, one.fileno()]) == [other.fileno(), one.fileno()]
    assert Channel(other).available() == ([Kill(rank=3)], True)
    assert Channel(one).available() == ([], False)
    assert readable([one, silent], 0.0) == [one.fileno()]  # who has ended goes on being ready


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_a_run_whose_processes_hold_many_files_survives_a_death(tmp_path: Path) -> None:
    """A zygote's socket has the number that it has in its agent."""

    def start_agent(arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", HOLDING, *arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                start_new_session=True)  # fmt: skip

    with patch("unskew.runtime.control.membership.start_agent", start_agent):
        run: Run = train(tmp_path, "kill:rank=3,at=4", forked=False)
    ended = run.of(RunFinished)[-1]
    assert (ended.status, ended.reason) == ("done", "")
    assert [lost.rank for lost in run.of(DeviceLost)] == [3]
