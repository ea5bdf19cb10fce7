"""Kills at any moment: of the whole process tree, and of the controller alone. What is lost, and are the losses the same?

Each run is killed several times and gone on with by `unskew run --resume`, as a person would: after the tree from its newest
checkpoint in new processes, after the controller in the ranks that live.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from support.processes import collectors, send_signal, tree

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.events import IterationCommitted, RunStarted
from unskew.collector.files.checkpoints import checkpoints
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.options import RunOptions

OPTIONS = RunOptions(
    device="virtual", pp=2, dp=2, layers=4, micro_batches=4, dim=16, heads=1, tokens=64, iterations=240, dtype="float64",
    checkpoint_every=4, respawns=0,
)  # fmt: skip
CHAINS, KILLS = 5, 4
"""Runs of each kind, and how often each is killed."""
MOST_COMMITS = 30
"""A run is killed after 0 to so many iterations more, and a moment."""
_WAIT_S, _END_S, _GONE_S = 240.0, 400.0, 40.0
_MARK = "UNSKEW_BENCH_CHAIN"


class Chain(msgspec.Struct, kw_only=True):
    """A run with all its kills. `lost`: iterations that were trained again although a checkpoint had them; `redone`: trained
    again at all; `orphans`: processes left when it was over; `problem` "" = it came to its end."""

    kills: int = 0
    lost: int = 0
    redone: int = 0
    difference: float = float("inf")
    not_once: int = 0
    replaced: int = 0
    orphans: int = 0
    problem: str = ""


def figures(bench: Bench, chains: int = CHAINS, kills: int = KILLS, options: RunOptions = OPTIONS) -> list[Figure]:
    """A failure-free reference, then the chains of both kinds side by side: half of their time they start and wait."""
    reference = bench.run(options).summary.losses
    done: dict[bool, list[Chain]] = {True: [], False: []}
    with ThreadPoolExecutor(len(done)) as pool:
        for seed in bench.steps(f"two runs with {kills} kills each", range(chains)):
            pair = {
                whole: pool.submit(_Chain(bench.store.root, options, reference, whole=whole, seed=seed).train, kills)
                for whole in done
            }
            for whole, chain in pair.items():
                done[whole].append(chain.result())
    return [
        *_figures("resume: kills of the whole process tree", done[True], whole=True),
        *_figures("resume: kills of the controller alone", done[False], whole=False),
    ]


def _figures(name: str, chains: Sequence[Chain], *, whole: bool) -> list[Figure]:
    ended = [chain for chain in chains if not chain.problem]
    kills = sum(chain.kills for chain in chains)
    problems = "; ".join(chain.problem for chain in chains if chain.problem)
    redone = sum(chain.redone for chain in chains)
    note = f"{kills} kills; {redone} iterations were trained again, all since a checkpoint" if whole else f"{kills} kills"
    return [
        figure(f"{name}: runs that came to their end", len(ended), "", bar=len(chains), better="higher", note=problems),
        figure(
            f"{name}: iterations lost" + (" beyond the newest checkpoint" if whole else ""),
            sum(chain.lost for chain in chains) if whole else redone, "", bar=0, better="lower", note=note,
        ),
        figure(
            f"{name}: largest difference of any iteration's loss, float64", max(chain.difference for chain in chains), "nats",
            bar=1e-8, better="lower", note="against the failure-free run of the same seed",
        ),
        figure(
            f"{name}: (layer, micro-batch, F or B) that does not count exactly once", sum(chain.not_once for chain in chains),
            "", bar=0, better="lower",
        ),
        *([] if whole else [figure(
            f"{name}: ranks that are not the process they were", sum(chain.replaced for chain in chains), "", bar=0,
            better="lower",
        )]),
        figure(
            f"{name}: processes left {_GONE_S:.0f} s after the end", sum(chain.orphans for chain in chains), "", bar=0,
            better="lower",
        ),
    ]  # fmt: skip


class _Chain:
    """Starts, kills and resumes one run; `whole`: the tree of its processes is killed, not the controller alone."""

    def __init__(self, folder: Path, options: RunOptions, reference: Sequence[float], *, whole: bool, seed: int) -> None:
        self._options, self._reference, self._whole = options, reference, whole
        self._chance = random.Random(f"{whole}/{seed}")
        self._mark = f"{os.getpid()}-{whole}-{seed}"
        self._store = Store(folder / f"chain-{self._mark}")
        self._answer = folder / f"answer-{self._mark}.json"
        self._runs: list[str] = []
        self._first = 0
        self._killed: tuple[int, int] | None = None
        """At the last kill that no run has gone on from yet: iterations committed, and those of the newest checkpoint."""
        self.chain = Chain()

    def train(self, kills: int) -> Chain:
        """The whole chain, whatever happens."""
        chain = self.chain
        try:
            process = self._start()
            for number in range(kills):
                self._reach(process, number)
                if process.poll() is not None:
                    break  # it was through
                self._kill(process)
                chain.kills += 1
                process = self._start()
            if process.wait(_END_S) != 0:
                chain.problem = f"exit code {process.returncode}, runs {', '.join(self._runs)}"
            else:
                self._compare()
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            chain.problem = f"{error} ({', '.join(self._runs)})"
            for pid in self._marked():
                send_signal(pid, signal.SIGKILL)
        until = time.monotonic() + _GONE_S
        while (left := self._marked()) and time.monotonic() < until:
            time.sleep(0.2)
        chain.orphans = len(left)
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        return chain

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = ["--resume", self._runs[-1]] if self._runs else ["--no-faults", *_flags(self._options)]
        command = [sys.executable, "-P", "-m", "unskew", "run", "--no-dashboard", "--store", str(self._store.root)]
        command += ["--json", str(self._answer), *arguments]
        env = {**os.environ, _MARK: self._mark}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)

    def _reach(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Wait for the moment of a kill. The first comes when there is a checkpoint; some come while a resumed run starts."""
        if number and self._chance.random() < 0.25:
            time.sleep(self._chance.uniform(0.0, 2.0))
            return
        if number == 0:
            self._until(lambda: self._look() and bool(checkpoints(self._store, self._runs[-1])), process)
        else:
            self._until(lambda: self._look() and self._killed is None, process)
        begun, more = max(self._committed(), self._first), self._chance.randint(0, MOST_COMMITS)
        self._until(lambda: self._committed() >= begun + more, process)
        time.sleep(self._chance.uniform(0.0, 0.1))

    def _look(self) -> bool:
        """Whether a run has begun. A resumed one has its own name, and began where it says; one that is taken over has not."""
        for run in sorted(set(self._store.spooled_runs()) - set(self._runs)):
            events = [entry.event for entry in Tail(self._store, run, only="@").poll()]
            for started in (event for event in events if isinstance(event, RunStarted)):
                self._runs.append(run)
                self._first = started.first_iteration
                if self._killed is not None:
                    committed, at = self._killed
                    self.chain.redone += max(committed - self._first, 0)
                    self.chain.lost += max(at - self._first, 0)
                    self._killed = None
        return bool(self._runs)

    def _committed(self) -> int:
        if not self._runs:
            return 0
        commits = (entry.event for entry in Tail(self._store, self._runs[-1]).poll())
        return max((event.iteration + 1 for event in commits if isinstance(event, IterationCommitted)), default=0)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        for pid in tree(process.pid) if self._whole else [process.pid]:
            send_signal(pid, signal.SIGKILL)
        process.wait()
        if self._whole:  # who was nobody's child when the tree was read
            for pid in self._marked():
                send_signal(pid, signal.SIGKILL)
            self._look()
            if self._killed is None:
                whole = checkpoints(self._store, self._runs[-1])
                at = max((one.index.iterations for one in whole), default=self._first)
                self._killed = self._committed(), at

    def _compare(self) -> None:
        summary = msgspec.json.decode(self._answer.read_bytes(), type=dict[str, Any])
        losses = summary["losses"]
        if summary["status"] != "done" or len(losses) != len(self._reference):
            self.chain.problem = f"{summary['status']}, {len(losses)} of {len(self._reference)} losses"
            return
        self.chain.difference = max(abs(mine - other) for mine, other in zip(losses, self._reference, strict=True))
        with open_store(self._store) as reader:
            for run in self._runs[-1:]:
                self.chain.not_once += reader.sql(f"select * from executed('{run}') where times != 1").height
                if not self._whole:
                    query = "select count(*) - count(distinct rank) as n from events where run = ? and type ^@ 'device_joined'"
                    self.chain.replaced += int(reader.sql(query, [run])["n"][0])
                    query = "select count(distinct iteration) as n from chunks where run = ? and attempt > 0"
                    self.chain.redone += int(reader.sql(query, [run])["n"][0])

    def _marked(self) -> list[int]:
        """Living processes of this chain, save collectors, which end by themselves when they have nothing left to do."""
        found, mark = [], f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                alive = entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return sorted({*found} - {*collectors(self._store)})

    def _until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _WAIT_S
        while not condition() and process.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"nothing new for {_WAIT_S:.0f} s")
            time.sleep(0.02)


def _flags(options: RunOptions) -> list[str]:
    """The options that are not the defaults, as a person types them."""
    fields = {field.name: field.default for field in msgspec.structs.fields(RunOptions)}
    changed = {name: getattr(options, name) for name in fields if getattr(options, name) != fields[name]}
    return [part for name, value in changed.items() for part in (f"--{name.replace('_', '-')}", str(value))]
