"""Processes of a run end with it, whoever is killed; the collector's death costs neither events nor verdicts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import collectors, parent, send_signal
from support.training.runtime_runs import LONG_CHUNKS, SMALL, Run, light, train, wait_until

from unskew.collector.command import Command
from unskew.collector.events import DeviceJoined, IterationCommitted, IterationJudged, RunFinished, Verdict
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import CommandError, send
from unskew.runtime.channel import Channel, readable
from unskew.runtime.heartbeat_page import HeartbeatPage, shared_memory
from unskew.runtime.node.processes import ENDING, process_state
from unskew.runtime.node.zygote import Zygote
from unskew.runtime.protocol import RankExited

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]
ENDLESS = [
    "run", "--device", "virtual", "--pp", "2", "--dp", "2", "--layers", "2", "--dim", "16", "--heads", "1", "--tokens", "64",
    "--micro-batches", "2", "--no-faults", "--no-dashboard", "--iterations", "1000000", "--controller-wait", "1",
]  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_controller_that_ends_takes_its_run_with_it(
    how: signal.Signals, tmp_path: Path, processes: Callable[[], dict[int, str]]
) -> None:
    heard = ["env", "--default-signal=HUP"]  # these tests may be run under nohup
    command = [*heard, sys.executable, "-m", "unskew", *ENDLESS, "--store", str(tmp_path)]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert controller.stdout is not None
    while "iteration" not in controller.stdout.readline():
        pass

    def left() -> dict[int, str]:
        return {pid: line for pid, line in processes().items() if "collector.service" not in line}

    assert len(left()) >= 7  # controller, agent, zygote, four ranks
    controller.send_signal(how)
    asked_s = time.monotonic()
    controller.communicate(timeout=20)
    wait_until(lambda: not left(), 10)
    assert not left()
    assert time.monotonic() - asked_s < 5
    with open_store(Store(tmp_path)) as reader:
        ((run, status, iterations),) = reader.sql("select run, status, iterations from runs").rows()
        assert reader.sql(f"select * from executed('{run}') where times != 1").is_empty()
    assert (status, iterations > 0) == ("unfinished" if how == signal.SIGKILL else "stopped", True)
    with pytest.raises(CommandError, match="no living controller"):
        send(Store(tmp_path), run, Command(kind="note", run=run, by="mira", reason="anybody there?"))


@pytest.mark.parametrize(("who", "forked"), [("agent", False), ("zygote", True)])
def test_a_run_whose_agent_or_zygote_is_killed_says_which_and_what_went_with_it(who: str, forked: bool, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(run: Run, entry: Entry) -> None:
        if isinstance(entry.event, IterationJudged) and not killed:
            zygote = parent(run.of(DeviceJoined)[0].pid)
            killed.append(zygote if who == "zygote" else parent(zygote))
            os.kill(killed[0], signal.SIGKILL)

    run = train(tmp_path, base=light(SMALL), on_event=kill, iterations=1000, forked=forked)
    (finished,) = run.of(RunFinished)
    ended = {"agent": "the agent is gone (signal SIGKILL)", "zygote": "the zygote has ended (signal SIGKILL)"}[who]
    assert finished.status == "failed"
    assert finished.reason.startswith(f"{ended}, with it ranks 0, 1, 2, 3, see ")


def test_a_death_is_reported_before_the_dead_is_reaped() -> None:
    """Reaping waits in the kernel, in real time, for the dead rank's last thread: up to a second where cores are few."""
    ours, theirs = map(Channel, socket.socketpair())
    before = signal.getsignal(signal.SIGCHLD)
    zygote = Zygote(theirs, HeartbeatPage(shared_memory()))
    try:
        if (pid := os.fork()) == 0:
            os._exit(3)
        zygote._rank_of_pid[pid] = 7
        assert readable([zygote._child_ended], 10)
        zygote._report()
        (ended,), _ = ours.available()
        assert isinstance(ended, RankExited)
        assert (ended.rank, ended.pid, ended.detail, process_state(pid)) == (7, pid, "exit code 3", ENDING)
        zygote._reap()
        assert process_state(pid) is None
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        ours.close()
        theirs.close()


def test_ranks_on_virtual_time_wait_for_a_controller_that_is_behind(tmp_path: Path) -> None:
    ahead: list[int] = []

    def stall(run: Run, entry: Entry) -> None:
        if isinstance(entry.event, IterationJudged) and entry.event.iteration == 3:
            time.sleep(1.0)
            logged = (one.event for one in Tail(run.store, run.id).poll())
            ahead.append(max(event.iteration for event in logged if isinstance(event, IterationCommitted)))

    run = train(tmp_path, base=light(SMALL), on_event=stall, iterations=30)
    assert run.of(RunFinished)[-1].status == "done"
    assert len(ahead) == 1
    assert ahead[0] < 20  # some were judged in the meantime of the log's way, and those that are allowed beyond


class Saboteur:
    """Stops the collector before the fault begins, and kills it once the verdict is there, or at the run's end."""

    def __init__(self) -> None:
        self.stopped: list[int] = []
        self.state_at_verdict: str | None = None

    def __call__(self, run: Run, entry: Entry) -> None:
        if isinstance(entry.event, IterationJudged) and entry.event.iteration >= 4 and not self.stopped:
            assert wait_until(lambda: any(collectors(run.store)), 10)
            self.stopped = list(collectors(run.store))
            for pid in self.stopped:
                send_signal(pid, signal.SIGSTOP)
        elif isinstance(entry.event, Verdict) and self.stopped and self.state_at_verdict is None:
            self.state_at_verdict = process_state(self.stopped[0])
            for pid in self.stopped:
                send_signal(pid, signal.SIGKILL)


def test_with_the_collector_down_verdicts_come_and_afterwards_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    saboteur = Saboteur()
    slow = "slow:rank=2,factor=1.8,at=12"
    run = train(tmp_path, slow, base=LONG_CHUNKS, layers=8, profile="long", on_event=saboteur, collector_stays=True)
    assert run.of(RunFinished)[-1].status == "done"
    verdict = run.of(Verdict)[0]
    assert (verdict.cause, [party.rank for party in verdict.culprits], verdict.at_iteration <= 17) == ("slow_device", [2], True)
    assert len(saboteur.stopped) == 1
    assert saboteur.state_at_verdict == "T"
    # The agent starts another one, which goes on where the last transaction ended, and ends when there is nothing left to do.
    assert saboteur.stopped[0] not in collectors(run.store)
    assert wait_until(lambda: not any(collectors(run.store)), 20)
    counts = run.summary.events
    assert (counts.stored, counts.dropped) == (counts.written, 0)
    writers = run.sql("select writer, min(seq) as first, max(seq) as last, count(*) as n from events group by 1")
    assert len(writers) == 7  # four ranks, the agent, the controller and its control stream
    for writer in writers:
        assert (writer["first"], writer["last"] - writer["first"] + 1) == ("@" in writer["writer"], writer["n"])
    assert not list(run.store.spool(run.id).glob("*/*.jsonl"))


def slices(call: str) -> list[tuple[int, str]]:
    """(policy, slice) of a thread that made the call, and of its child."""
    probe = "print(os.sched_getscheduler(0), next((x.split()[-1] for x in open('/proc/self/sched') if 'se.slice' in x), ''))"
    code = (
        f"import os, sys; from unskew.runtime.priority import *; {call}; os.fork() and os.wait(); {probe}; sys.stdout.flush()"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # The child is waited for, so it speaks first.
    child, parent = (line.partition(" ") for line in output.splitlines())
    return [(int(policy), length) for policy, _, length in (parent, child)]


def test_who_listens_runs_soon_and_what_it_starts_does_not_inherit_it() -> None:
    (policy, length), child = slices("answer_soon()")
    if not length or not kernel_has_slices():
        pytest.skip("this kernel knows no slices of different length")
    assert (policy & ~os.SCHED_RESET_ON_FORK, length) == (os.SCHED_OTHER, "100000")
    assert child[0] == os.SCHED_OTHER
    assert int(child[1]) > 100_000


def test_who_reports_deaths_runs_at_once_where_it_may() -> None:
    (policy, _), child = slices("answer_at_once()")
    may = subprocess.run(
        [sys.executable, "-c", "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"], check=False
    )
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0  # what people have asked for stays
    assert policy & ~os.SCHED_RESET_ON_FORK == (os.SCHED_RR if may.returncode == 0 and not nice else os.SCHED_OTHER)
    assert child[0] == os.SCHED_OTHER


def kernel_has_slices() -> bool:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (6, 12)


IMPORTED_AFTERWARDS = """
import sys
import unskew.runtime.node.zygote
import torch
from unskew.analytics.core.packing import pack
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.options import RunOptions
from unskew.runtime.size import ModelSize
before = set(sys.modules)
held = HeldLayer(ModelSize(n_layers=3, dim=8, heads=1), 1, seed=0, dtype=torch.float32, device=torch.device("cpu"))
out = held.module(torch.randn(4, 8, requires_grad=True), [4])
torch.autograd.backward(out, torch.ones_like(out))
held.step()
RunOptions().first_plan()
pack([4] * 9, seed=0, iteration=0, micro_batches=2, max_tokens=8)
print(sorted(set(sys.modules) - before))
"""


def test_a_zygote_has_imported_what_its_ranks_need() -> None:
    """What a rank imports costs each rank what it would have cost once; torch.optim.AdamW: two seconds of CPU in each."""
    command = [sys.executable, "-P", "-c", IMPORTED_AFTERWARDS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
