"""A soak: sixteen ranks, a random fault every five iterations. Are the losses those of an undisturbed run, is anything leaked?

Who is struck is chosen when it is due, from those whose layers others hold: a soak is not about runs that must end. Faults are
kills, two kills within 120 ms, hangs, pauses of up to 1.5 s, slow phases, and processes that are started for the lost ones.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec
from support.processes import parent, send_signal

from unskew.analytics.core.plan import Plan
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench, FinishedRun, done, loss_difference
from unskew.collector.command import Command
from unskew.collector.events import (
    DeviceJoined,
    DeviceLost,
    Event,
    IterationCommitted,
    PlanApplied,
    PlanIssued,
    RankAdded,
    Regrouped,
    RunStarted,
)
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import CommandError, send
from unskew.runtime.options import RunOptions

OPTIONS = RunOptions(
    device="virtual", pp=4, dp=4, layers=8, micro_batches=16, dim=16, heads=1, tokens=64, iterations=500, dtype="float64",
    respawns=0,
)  # fmt: skip
"""Who is lost comes back when the soak asks for it."""
SHORT = 150
"""Iterations where not all of it is asked for."""
SEEDS, ALL_SEEDS = (0,), (0, 1, 2)
EVERY, FIRST = 5, 10
KINDS = ("kill", "kill", "double", "hang", "pause", "slow", "rejoin", "rejoin")
MOST_APART_S, MOST_PAUSE_S = 0.12, 1.5
AHEAD = 20
"""Iterations before a hang in which its rank counts as lost already."""
BEGINS_WITHIN_S = 5.0
MOST_MORE, MOST_MORE_MIB, MOST_GROUPS_LEFT = 2, 32, 1
"""A process may be in the middle of something: a file that is changed for the next one, groups that are built."""


def figures(bench: Bench, options: RunOptions = OPTIONS, seeds: Sequence[int] | None = None) -> list[Figure]:
    """Per seed a failure-free run and the soak."""
    if seeds is None:
        seeds = ALL_SEEDS if bench.full else SEEDS
        options = options if bench.full else msgspec.structs.replace(options, iterations=SHORT)
    runs, soaks, differences = [], [], []
    for seed in bench.steps(f"soak, {options.iterations} iterations", seeds):
        asked = msgspec.structs.replace(options, seed=seed)
        reference = bench.run(asked).summary.losses
        soak = Soak(asked, seed)
        before = shared_things()
        runs.append(bench.run(asked, *soak.specs, watch=soak.watch))
        soak.left_over = len(left_since(before))
        soaks.append(soak)
        differences.append(loss_difference(runs[-1], reference))
    struck = sum((soak.struck for soak in soaks), Counter())
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(struck.items()))
    how = f"{options.ranks} ranks, {options.iterations} iterations each, virtual device: {what}"
    seconds = [event.seconds for run in runs for event in run.of(Regrouped) if event.kept is not None]
    grown = [soak.grown() for soak in soaks]
    return [
        done("soak", runs, how),
        figure(
            "soak: largest difference of any iteration's loss, float64", max(differences), "nats", bar=1e-8, better="lower",
            note="against the failure-free runs of the same seeds",
        ),
        figure(
            "soak: (layer, micro-batch, F or B) that does not count exactly once", sum(run.not_once for run in runs), "",
            bar=0, better="lower", note="from the log: what was kept counts where it was executed",
        ),
        figure(
            "soak: iterations with another number of micro-batches", sum(map(uneven, runs)), "", bar=0, better="lower",
        ),
        figure(
            "soak: ranks lost that nobody struck, processes started for ranks that were not lost",
            sum(stray(run, soak) for run, soak in zip(runs, soaks, strict=True)), "", bar=0, better="lower",
            note=f"{sum(len(run.of(DeviceLost)) for run in runs)} losses, {sum(len(run.of(RankAdded)) for run in runs)} starts",
        ),
        *(
            figure(
                f"soak: {name} of a process more near the end than at iteration {Soak.LOOK}, most",
                max((one[name] for one in grown), default=None), unit, bar=bar, better="lower",
                note="agent, zygote, and ranks that live throughout",
            )
            for name, unit, bar in (
                ("open files", "", MOST_MORE), ("threads", "", MOST_MORE), ("memory", "MiB", MOST_MORE_MIB),
                ("groups that it uses no more", "", MOST_GROUPS_LEFT),
            )
        ),
        figure(
            "soak: entries of /dev/shm and agents' folders left", sum(soak.left_over for soak in soaks), "", bar=0,
            better="lower",
        ),
        figure(
            "soak: from a death until all survivors have regrouped, median", median(seconds) if seconds else None, "s",
            bar=0.3, better="lower", note=f"longest {max(seconds, default=0):.3f} s of {len(seconds)}",
        ),
    ]  # fmt: skip


def uneven(run: FinishedRun) -> int:
    """Iterations whose log has another number of micro-batches than the others."""
    query = """select count(*) as n from (select iteration, count(distinct micro_batch) as n from chunks where run = ?
        group by iteration having n != ?)"""
    with open_store(Store.locate(run.options.store)) as reader:
        return int(reader.sql(query, [run.summary.run_id, run.options.micro_batches])["n"][0])


def stray(run: FinishedRun, soak: Soak) -> int:
    """Losses of ranks beyond those that were struck, and starts of processes of ranks that lived."""
    lost = Counter(event.rank for event in run.of(DeviceLost))
    started = Counter(event.rank for event in run.of(RankAdded))
    return sum(((lost - soak.ending) + (started - lost)).values())


def left_since(before: set[str]) -> set[str]:
    """What is left of what was not there before. The folder of another run that begins now is there before it listens in it."""
    left = shared_things() - before
    if left:
        time.sleep(BEGINS_WITHIN_S)
        left &= shared_things()
    return left


def shared_things() -> set[str]:
    """What processes have left where all share it: none has it in its command, or listens in it."""
    commands = [Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            commands.append((entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else "")
    found = chain(Path("/dev/shm").iterdir(), Path("/tmp").glob("unskew-agent-*"))
    return {str(path) for path in found if not any(str(path) in command for command in commands)}


class Footprint(msgspec.Struct, frozen=True):
    """What a process holds of the machine: files and threads that are no communication group's, memory that is no file's
    (shared with forked children or not: that changes by 50 MiB as they come and go), groups, and those of them that it uses no
    more."""

    files: int
    threads: int
    mib: float
    groups: int
    groups_left: int


def footprint(pid: int) -> Footprint | None:
    """None where it is gone."""
    with suppress(OSError, StopIteration):
        folder = Path(f"/proc/{pid}")
        lines = (folder / "smaps_rollup").read_text().splitlines()
        anonymous = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
        files = [str(entry.readlink()) for entry in (folder / "fd").iterdir()]
        names = Counter((entry / "comm").read_text().strip() for entry in (folder / "task").iterdir())
        groups = names["pt_gloo_runloop"] // 2  # each has two of these, and a device with a thread of its own
        return Footprint(
            files=sum(file.startswith("/") for file in files),
            threads=names.total() - names["pt_gloo_runloop"] - names["gloo_tcp_loop"],
            mib=anonymous / 1024,
            groups=groups,
            groups_left=max(names["gloo_tcp_loop"] - groups, 0),
        )
    return None


class Soak:
    """Strikes a run as it goes on. `struck`: how often what was done; `ending`: rank -> how often it was to be lost."""

    LOOK = 60
    """The iteration by which all that is held for good has been taken."""

    def __init__(self, options: RunOptions, seed: int) -> None:
        self._options, self._chance = options, random.Random(f"soak/{seed}")
        self._due = [(at, self._chance.choice(KINDS)) for at in range(FIRST, options.iterations - FIRST, EVERY)]
        self._pids: dict[int, int] = {}
        self._lost: set[int] = set()
        self._plans: list[Plan] = []
        self._run = ""
        self._passed = -1
        self._hangs: dict[int, int] = {}
        self.specs: list[str] = []
        self.struck: Counter[str] = Counter()
        self.ending: Counter[int] = Counter()
        self.left_over = 0
        self._before: dict[int, Footprint] = {}
        self._after: dict[int, Footprint] = {}
        for at, kind in self._due:
            rank = self._chance.randrange(options.ranks)
            if kind == "hang":
                self._hangs[at] = rank
                self.specs.append(f"hang:rank={rank},at={at}")
            elif kind == "slow":
                factor, until = self._chance.uniform(1.3, 3.0), at + self._chance.randint(3, 20)
                shape = self._chance.choice(("", ",ramp=4", ",every=4,on=2", ",of=memory"))
                self.specs.append(f"slow:rank={rank},factor={factor:.2f},at={at},until={until}{shape}")

    def watch(self, store: Store, event: Event) -> None:
        """One more event of the run."""
        match event:
            case RunStarted():
                self._run = event.run
            case DeviceJoined():
                self._pids[event.rank] = event.pid
                self._lost.discard(event.rank)
            case DeviceLost():
                self._lost.add(event.rank)
            case PlanApplied():
                self._plans = [Plan.from_data(event.plan)]
            case PlanIssued():
                self._plans = [*self._plans[:1], Plan.from_data(event.plan)]
            case IterationCommitted() if event.iteration > self._passed:
                self._passed = event.iteration
                self._look()
                while self._due and self._due[0][0] <= event.iteration:
                    self._strike(store, *self._due.pop(0))

    def grown(self) -> dict[str, float]:
        """The most that a process holds more at the end than it did."""
        pairs = [(self._before[pid], after) for pid, after in self._after.items() if pid in self._before]
        working = [(before, after) for before, after in pairs if bool(before.groups) == bool(after.groups)]
        return {
            "open files": max((after.files - before.files for before, after in pairs), default=0),
            "threads": max((after.threads - before.threads for before, after in pairs), default=0),
            "memory": max((after.mib - before.mib for before, after in working), default=0.0),
            "groups that it uses no more": max((after.groups_left for after in self._after.values()), default=0),
        }

    def _look(self) -> None:
        late = self._options.iterations - FIRST
        if self._passed not in (self.LOOK, late):
            return
        ranks = [pid for rank, pid in self._pids.items() if rank not in self._lost]
        zygote = parent(ranks[0])
        found = {pid: one for pid in (*ranks, zygote, parent(zygote)) if (one := footprint(pid)) is not None}
        if self._passed == self.LOOK:
            self._before = found
        else:
            self._after = found

    def _strike(self, store: Store, at: int, kind: str) -> None:
        if kind == "rejoin":
            self._start_lost(store)
        elif kind in ("hang", "slow"):
            self.struck[kind] += 1
            if kind == "hang":
                self.ending[self._hangs[at]] += 1
        else:
            self._signal(at, kind)

    def _start_lost(self, store: Store) -> None:
        for rank in sorted(self._lost):
            with suppress(CommandError):
                send(store, self._run, Command(kind="rank", run=self._run, target=str(rank), by="soak"))
                self.struck["start"] += 1

    def _signal(self, at: int, kind: str) -> None:
        hanging = {rank for when, rank in self._hangs.items() if at - EVERY <= when <= at + AHEAD}
        gone = self._lost | hanging
        for number in range(2 if kind == "double" else 1):
            free = [rank for rank in self._pids if rank not in gone and self._covered(gone | {rank})]
            if not free:
                self.struck["left out"] += 1
                return
            rank = self._chance.choice(free)
            gone |= {rank}
            delay_s = self._chance.uniform(0.0, 0.1) + number * self._chance.uniform(0.0, MOST_APART_S)
            self.struck[kind] += 1
            self.ending[rank] += 1
            pid = self._pids[rank]
            which = signal.SIGSTOP if kind == "pause" else signal.SIGKILL
            threading.Timer(delay_s, send_signal, (pid, which)).start()
            if kind == "pause":
                pause_s = self._chance.uniform(0.1, MOST_PAUSE_S)
                threading.Timer(delay_s + pause_s, send_signal, (pid, signal.SIGCONT)).start()

    def _covered(self, gone: set[int]) -> bool:
        """Whether without these ranks each layer has a holder in the plan in force and in the one that comes."""
        return all(
            any(layer in role.layers and role.rank not in gone for role in plan.roles)
            for plan in self._plans
            for layer in range(plan.n_layers)
        )
