"""kill -9 in the midst of a watched training: of a rank, the command, the watcher, the collector. Is the log whole, the exit
code right, and nothing left behind?

Each job is started by `unskew watch -- python killed_job.py` (tests/support), two forked ranks with Gloo. The victim is killed
a random moment after a random iteration is in the log, and the job goes on for some steps, however long they take. A rank that
is killed takes with it what it has not handed to the kernel yet, the last quarter of a second; nobody else loses anything.

A training whose watcher was killed goes on to its end: what is ours is to be gone soon after that, and after the watcher.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.jobs import killed_job
from support.processes import collectors, parent, processes_of, send_signal

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.events import DeviceJoined, IterationCommitted
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

VICTIMS = ("rank 0", "rank 1", "collector", "watcher", "command")
KILLS, FEW = 50, 10
LIMIT_S, LEFT_S, SOON_S, LOOK_S = 60.0, 20.0, 10.0, 0.01
KILLED = 128 + signal.SIGKILL
CODES = {"collector": 0, "watcher": -signal.SIGKILL, "command": KILLED}
"""What `unskew watch` ends with; where a rank was killed, with what the command then does."""


class KillOutcome(NamedTuple):
    """`problems`: a sentence each; `lost`, `doubled`: events; `gone_s`: from the end of the training and its watcher to that of
    the last process."""

    victim: str
    problems: tuple[str, ...]
    lost: int
    doubled: int
    code_right: bool
    left: int
    gone_s: float


def figures(bench: Bench, kills: int = KILLS, victims: Sequence[str] = VICTIMS) -> list[Figure]:
    asked = [(victims[number % len(victims)], number) for number in range(kills)]
    found = bench.kept("kills in watched jobs", asked, lambda one: killed(*one), KillOutcome)
    note = f"{kills} kill -9 of {', '.join(victims)} in turn, each at a random moment of a DDP training of two ranks"
    wrong = [f"{one.victim}: {'; '.join(one.problems)}" for one in found if one.problems]
    return [
        figure("attach: events lost by a kill", sum(one.lost for one in found), "", bar=0, better="lower",
               note=f"{note}; gaps in the numbers of any writer, and steps that a rank did and the log lacks"),
        figure("attach: events doubled by a kill", sum(one.doubled for one in found), "", bar=0, better="lower"),
        figure("attach: exit codes that are not the command's", sum(not one.code_right for one in found), "", bar=0,
               better="lower", note=f"{KILLED} where the command itself was killed"),
        figure("attach: processes left behind", sum(one.left for one in found), "", bar=0, better="lower",
               note=f"{LEFT_S:.0f} s after the training and its watcher have ended; wrong: {'. '.join(wrong) or 'nothing'}"),
        figure("attach: from their end to that of the last process", max(one.gone_s for one in found), "s", bar=SOON_S,
               better="lower", note="the longest"),
    ]  # fmt: skip


def figures_of_few(bench: Bench) -> list[Figure]:
    """In two minutes rather than ten."""
    return figures(bench, FEW)


def killed(victim: str, seed: int) -> KillOutcome:
    """One job, and what is left of it."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="unskew-kills-") as name:
        folder, store = Path(name), Store(Path(name) / "store")
        (folder / killed_job.GO_ON).touch()
        command = [sys.executable, killed_job.__file__, name]
        watch = subprocess.Popen(
            [sys.executable, "-m", "unskew", "watch", "--store", str(store.root), "--", *command],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            run = _kill(store, watch, victim, chance.randint(2, 60), chance.uniform(0.0, 0.1))
            (folder / killed_job.GO_ON).unlink()
            code = watch.wait(LIMIT_S)
        finally:
            watch.kill()
            watch.wait()
        left, gone_s = _left(folder)
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        return _looked_at(folder, run, victim, code, left=[*left.values()], gone_s=gone_s)


def _kill(store: Store, watch: subprocess.Popen[bytes], victim: str, iteration: int, delay_s: float) -> str:
    """Kill it when the log shows the iteration; the run's name."""
    until, pids, run, tail = time.monotonic() + LIMIT_S, dict[str, int](), "", None
    while time.monotonic() < until and watch.poll() is None:
        if tail is None and (runs := store.spooled_runs()):
            run, tail = runs[0], Tail(store, runs[0])
        seen = [] if tail is None else [entry.event for entry in tail.poll()]
        pids.update({f"rank {one.rank}": one.pid for one in seen if isinstance(one, DeviceJoined)})
        due = len(pids) == 2 and any(isinstance(one, IterationCommitted) and one.iteration >= iteration for one in seen)
        if due and (collecting := collectors(store)):
            time.sleep(delay_s)
            everybody = {**pids, "watcher": watch.pid, "command": _command_of(watch.pid), "collector": collecting[0]}
            send_signal(everybody[victim], signal.SIGKILL)
            return run
        time.sleep(LOOK_S)
    raise TimeoutError(f"no iteration {iteration} of the job was in the log within {LIMIT_S:.0f} s")


def _command_of(watcher: int) -> int:
    """The process that the watcher has started to train."""
    return next(pid for pid in processes_of(killed_job.__file__) if parent(pid) == watcher)


def _left(folder: Path) -> tuple[dict[int, str], float]:
    """What still runs `LEFT_S` after the training has ended, pid -> which process it is; and how long it took to be gone."""
    store, ended_s, until_s = Store(folder / "store"), time.monotonic(), time.monotonic() + LIMIT_S
    while (left := processes_of(str(folder))) and time.monotonic() < until_s:
        if set(left) - set(collectors(store)):  # the training goes on
            ended_s = time.monotonic()
        elif time.monotonic() > ended_s + LEFT_S:
            break
        time.sleep(0.05)
    serving = collectors(store)
    names = {pid: "the collector" if pid in serving else "a process of the training" for pid in left}
    return names, time.monotonic() - ended_s


def _looked_at(folder: Path, run: str, victim: str, code: int, *, left: Sequence[str], gone_s: float) -> KillOutcome:
    with open_store(Store(folder / "store")) as reader:
        writers = reader.sql(
            "select writer, count(*) as n, count(distinct seq) as apart, max(seq) + (stream is null)::int as numbers "
            "from events where run = $run group by writer, stream", {"run": run},
        ).to_dicts()  # fmt: skip
        logged = dict(
            reader.sql(
                "select rank, count(*) from events where run = $run and type like 'iteration_committed%' group by rank",
                {"run": run},
            ).rows()
        )
    problems = [f"{of['writer']}: {of['apart']} of {of['numbers']} events" for of in writers if of["apart"] != of["numbers"]]
    lost = sum(of["numbers"] - of["apart"] for of in writers)
    for rank in range(2):
        steps = int((folder / f"steps-{rank}").read_text())
        # A rank that was killed cannot hand over what it had in memory; one whose step ended with an error did not commit it.
        if victim != f"rank {rank}" and (missing := steps - logged.get(rank, 0)) > 0:
            lost += missing
            problems.append(f"rank {rank} did {steps} steps, the log has {logged.get(rank, 0)}")
    doubled = sum(of["n"] - of["apart"] for of in writers)
    expected = CODES.get(victim, killed_job.FAILED)
    if code != expected:
        problems.append(f"exit code {code}, not {expected}")
    if left:
        problems.append(f"left: {', '.join(left)}")
    return KillOutcome(victim, tuple(problems), lost, doubled, code == expected, len(left), gone_s)
