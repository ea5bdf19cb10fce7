"""`unskew watch -- CMD` that somebody stops: it says so, accuses nobody, and leaves neither a gap in the log nor a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 80:
        Path(sys.argv[1]).touch()
"""


@pytest.fixture(autouse=True)
def _hangups_count() -> Iterator[None]:
    """Whatever these tests are started by: what nohup ignores stays ignored in all that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def command_in(tmp_path: Path) -> tuple[Path, list[str]]:
    """The file that is there when it trains, and the command."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    trains, summed, page = (tmp_path / name for name in ("trains", "w.json", "w.html"))
    unskew = [sys.executable, "-m", "unskew", "watch", "--store", str(tmp_path / "store")]
    files = ["--json", str(summed), "--html", str(page)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return trains, [*unskew, *files, "--", *torchrun, str(script), str(trains)]


def twice_in_the_terminal(watch: subprocess.Popen[str]) -> None:
    """The second one ends torchrun while it waits for its ranks."""
    for _ in range(2):
        os.killpg(watch.pid, signal.SIGINT)
        time.sleep(0.02)


def hung_up(watch: subprocess.Popen[str]) -> None:
    """By somebody who sends it to this process alone: it has no terminal."""
    watch.send_signal(signal.SIGHUP)


@pytest.mark.alone
@pytest.mark.limit(120)
@pytest.mark.parametrize("stop", [twice_in_the_terminal, subprocess.Popen.terminate, hung_up])
def test_a_training_that_was_asked_to_stop_is_stopped(tmp_path: Path, stop: Callable[[subprocess.Popen[str]], None]) -> None:
    trains, command = command_in(tmp_path)
    watch = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not trains.exists() and watch.poll() is None:
        time.sleep(0.05)
    stop(watch)
    shown = watch.communicate(timeout=60)[1]
    assert "it was asked to stop, and the command ended with exit code 1" in shown.replace("\n", " ").replace("  ", "")
    is_stopped(watch, tmp_path)


@pytest.mark.alone
@pytest.mark.limit(120)
def test_a_closed_terminal_ends_the_training_and_its_summary_is_written(tmp_path: Path) -> None:
    trains, command = command_in(tmp_path)
    ours, its = os.openpty()
    watch = subprocess.Popen(["setsid", "--ctty", *command], stdin=its, stdout=its, stderr=its)
    os.close(its)
    while not trains.exists() and watch.poll() is None:
        time.sleep(0.05)
    os.close(ours)  # the kernel tells the process alone that the terminal was opened for
    watch.wait(timeout=60)
    is_stopped(watch, tmp_path)


def is_stopped(watch: subprocess.Popen[Any], tmp_path: Path) -> None:
    """Whoever looks at what is left sees a run that was stopped."""
    summed, page = tmp_path / "w.json", tmp_path / "w.html"
    assert watch.returncode == 1  # torchrun's own
    summary = json.loads(summed.read_text())
    assert (summary["status"], [one for one in summary["verdicts"] if one["cause"] == "dead"]) == ("stopped", [])
    assert summary["iterations"] >= 40
    assert page.exists()
    with open_store(Store(tmp_path / "store")) as reader:
        assert reader.sql("select count(*) as n from events where type like 'run_finished%'")["n"].to_list() == [1]
    with pytest.raises(ProcessLookupError):  # the collector is of a session of its own
        os.killpg(watch.pid, 0)
