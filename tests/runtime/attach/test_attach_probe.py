"""A probe of a training that is not ours, without ranks: who asks, what its ranks do at the end of a step, what is said."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.training.virtual_loop import VirtualClock

from unskew.collector.command import Command
from unskew.collector.events import CommandRefused, Event, Probed, RankAttached
from unskew.collector.paths import Store
from unskew.collector.write.commands import hold_controller_lock, send
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach.asked.probe_file import read_probe
from unskew.runtime.attach.outside.watcher import JobWatcher
from unskew.runtime.attach.timeline import LoopTimeline

RUN = "run-1"


class Job:
    """Ranks on one logical clock; rank 1 takes longer for a product."""

    def __init__(self, folder: Path, *, on_gpu: bool = False, ranks: int = 2) -> None:
        self.store, self.clock, self.events = Store.locate(folder), VirtualClock(), list[Event]()
        self.spools = [SpoolWriter(self.store, RUN, f"rank-{rank:04d}.1", flush_s=0.001) for rank in range(ranks)]
        for rank, spool in enumerate(self.spools):
            spool.append(RankAttached(rank=rank, ranks=ranks, node=socket.gethostname(), pid=os.getpid(), on_gpu=on_gpu))
        self.ranks = [
            LoopTimeline(
                rank, ranks, f"node:{rank}", spool.append, ready=self.clock.ready, now=self.clock.now,
                product=lambda rank=rank: self.clock.work(2 + rank, without_core=1),
            )
            for rank, spool in enumerate(self.spools)
        ]  # fmt: skip
        self.watcher = JobWatcher(self.store, RUN, ["a test"], lambda entry: self.events.extend(filter(None, [entry.event])))

    def step(self, *asked: int) -> None:
        """Of all ranks; those that are asked measure themselves."""
        for rank, timeline in enumerate(self.ranks):
            timeline.probe_due = rank in asked
            timeline.loading()
            self.clock.work(1)
            timeline.loaded(None)
            self.clock.work(5)
            timeline.backward(1.0)
            self.clock.work(5)
            timeline.returned()
            timeline.stepping()
            self.clock.work(1)
            timeline.stepped()

    def begin(self) -> None:
        """The watcher has seen whole steps of all."""
        for _ in range(3):
            self.step()
        while self.watcher._state is None:
            self.watcher.look()

    def ask(self, rank: str) -> None:
        with hold_controller_lock(self.store, RUN):
            send(self.store, RUN, Command(kind="probe", run=RUN, target=rank, by="ann"))
        self.watcher.look()

    def end(self) -> list[Event]:
        for spool in self.spools:
            spool.close()
        self.watcher.finish(0)
        self.watcher.close()
        return [event for event in self.events if isinstance(event, Probed | CommandRefused)]


def test_ranks_measure_themselves_at_the_end_of_a_step_and_one_is_compared_with_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.begin()
    job.ask("1")
    assert read_probe(job.store, RUN) == 1
    job.step(0)
    job.step(1)
    job.step()
    (probed,) = job.end()
    assert isinstance(probed, Probed)
    assert (probed.ranks, probed.slowdowns, probed.beside) == ((1,), {"1": 1.5}, True), "3 ms against 2, the core apart"
    assert probed.cost_us == 9 * 4000


@pytest.mark.parametrize(
    ("rank", "on_gpu", "ranks", "reason"),
    [
        ("7", False, 2, "rank 7 is not in the run, its ranks are 0, 1"),
        ("1", True, 2, "the ranks use GPUs: a product on the host says nothing of them"),
        ("0", False, 1, "one rank has nobody to be compared with, and nothing was measured when it began"),
        ("1", False, 2, "ranks [0, 1] reached no end of a step in which they could measure themselves"),
    ],
)
def test_where_no_probe_can_be_had_who_asks_is_told_why(
    tmp_path: Path, rank: str, on_gpu: bool, ranks: int, reason: str
) -> None:
    job = Job(tmp_path, on_gpu=on_gpu, ranks=ranks)
    job.begin()
    job.ask(rank)
    (refused,) = job.end()
    assert isinstance(refused, CommandRefused)
    assert (refused.reason, refused.command, refused.by) == (reason, f"probe {rank}", "ann")
