"""Real runs, one after the other, looked at from outside: what the loop is measured on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.progress import Progress
from support.processes import collectors, send_signal, started_at, wait_for_collectors

from unskew.analytics.core.faults import parse_faults
from unskew.benchmarks.growth import draw_growth
from unskew.benchmarks.kept import KeptSteps
from unskew.benchmarks.report import Figure, bars, figure, publish, shown
from unskew.collector.events import DeviceJoined, DeviceLost, Event, IterationCommitted, Regrouped, RunFinished
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.control.launch import run as run_once
from unskew.runtime.control.summary import Summary
from unskew.runtime.options import RunOptions

_Event = TypeVar("_Event", bound=Event)
_Step = TypeVar("_Step")
_Found = TypeVar("_Found")
Watch = Callable[[Store, Event], None]
Part = Callable[["Bench"], Iterable[Figure]]

EIGHT_RANKS = RunOptions(pp=4, dp=2, layers=16, micro_batches=8, dim=16, heads=1, tokens=128, respawns=0)
"""PP4 x DP2 with maths so small that two cores carry eight ranks; the device's profile sets the time (15 and 30 ms a chunk).
Who is lost stays away."""
TWO_RANKS = RunOptions(device="real", pp=2, dp=1, layers=8, micro_batches=4, dim=64, heads=2, tokens=256)
"""PP2, each rank on a core of its own."""


class FinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run. `same_process`: ranks that were, at the last change of plan and near the end, the very process they
    began as. `not_once`: (kind, layer, micro-batch) cells of committed iterations not executed exactly once. `lost`, `doubled`:
    events missing from the store, or in it twice."""

    options: RunOptions
    summary: Summary
    events: list[Event]
    same_process: frozenset[int]
    not_once: int
    lost: int
    doubled: int

    def of(self, kind: type[_Event]) -> list[_Event]:
        """The events of one type, in the order in which the controller saw them."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def failure(self) -> str:
        """Why the run did not train on to its end; "" when it did."""
        ends = [f"{end.status}: {end.reason}" for end in self.of(RunFinished) if end.status != "done"]
        return "; ".join(ends) if self.of(RunFinished) else "no end in the log"

    @property
    def incomplete(self) -> int:
        """Committed iterations whose log was not complete when they were voted on."""
        return len({event.iteration for event in self.of(IterationCommitted) if not event.log_complete})


class _Witness:
    """Keeps a run's events, and looks at the processes of its ranks while they live."""

    def __init__(self, store: Store, iterations: int, watch: Watch | None) -> None:
        # Not at the very end: commits that are read after the ranks were asked to stop find no process any more.
        self._store, self._late, self._watch = store, iterations - 6, watch
        self.events: list[Event] = []
        self.same: frozenset[int] = frozenset()
        self._born: dict[int, tuple[int, str]] = {}

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, DeviceJoined):
            self._born.setdefault(event.rank, (event.pid, started_at(event.pid)))
        elif isinstance(event, DeviceLost):
            self.same -= {event.rank}
        elif isinstance(event, Regrouped) or (isinstance(event, IterationCommitted) and event.iteration == self._late):
            now = {rank: started_at(pid) for rank, (pid, _) in self._born.items()}
            # Who is gone without a loss in the log was asked to stop: an event of the last moments is read when some have been.
            asked = {rank for rank in self.same if not now[rank]}
            self.same = frozenset(asked | {rank for rank, (_, born) in self._born.items() if born and now[rank] == born})
        if self._watch is not None:
            self._watch(self._store, event)


class Bench:
    """Runs, one after the other, in one store, with a bar that shows what is running; `full`: with all seeds, however long."""

    def __init__(self, progress: Progress, store: Store, *, full: bool = False) -> None:
        self._progress, self.store, self.full = progress, store, full
        self._kept = KeptSteps(store.root)

    def steps(self, what: str, of: Sequence[_Step]) -> Iterator[_Step]:
        """`of`, one by one, shown to people."""
        yield from shown(self._progress, what, of)

    def kept(self, what: str, of: Sequence[_Step], measure: Callable[[_Step], _Found], kind: type[_Found]) -> list[_Found]:
        """What `measure` finds at each step; what a bench into the same store found there before, with this code, counts."""
        return [self._kept.of(f"{what} {step!r}", partial(measure, step), kind) for step in self.steps(what, of)]

    def counted(self, what: str) -> Callable[[int, int], None]:
        """Hears (done, all) of work that counts its own steps, and shows it to people."""
        task = self._progress.add_task(what, visible=self._progress.console.is_terminal)

        def report(done: int, total: int) -> None:
            self._progress.update(task, completed=done, total=total)
            if not self._progress.console.is_terminal:
                print(f"{time.strftime('%X')} {what}: {done} of {total}", file=sys.stderr, flush=True)

        return report

    def run(self, options: RunOptions, *faults: str, watch: Watch | None = None, settle: bool = False) -> FinishedRun:
        """One run; with `settle` the collector is left to end by itself before the store is looked at."""
        store = self.store
        parsed = parse_faults(faults, ranks=options.ranks, iterations=options.iterations, schedule=options.schedule)
        chosen = msgspec.structs.replace(options, store=str(store.root), faults=parsed)
        witness = _Witness(store, options.iterations, watch)
        summary = run_once(chosen, on_event=lambda entry: witness.take(entry.event) if entry.event else None)
        if settle:
            wait_for_collectors(store)
        with open_store(store) as reader:
            (counts,) = reader.sql(
                "select count(*) as stored, count(distinct (writer, seq)) as apart, "
                "(select count(*) from executed($run) where times != 1) as not_once from events where run = $run",
                {"run": summary.run_id},
            ).to_dicts()
        return FinishedRun(
            options=chosen,
            summary=summary,
            events=witness.events,
            same_process=witness.same,
            not_once=counts["not_once"],
            lost=summary.events.written - counts["apart"],
            doubled=counts["stored"] - counts["apart"],
        )


def done(what: str, runs: Sequence[FinishedRun], note: str = "") -> Figure:
    """How many of the runs ended, and why the others did not."""
    return done_of(what, [run.failure for run in runs], note)


def done_of(what: str, failures: Sequence[str], note: str = "") -> Figure:
    """The same of runs with these failures, "" = none."""
    reasons = [failure for failure in failures if failure]
    name, ended = f"{what}: runs that trained on to the end", len(failures) - len(reasons)
    return figure(name, ended, "", bar=len(failures), better="higher", note="; ".join([note, *reasons] if note else reasons))


def tried(what: str, measure: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
    """The figures of a part; where it breaks, those that it had, and one that says so."""
    try:
        yield from measure()
    except Exception as error:
        yield figure(what, None, "", better="lower", note=f"broke: {type(error).__name__}: {error}")


def perform(name: str, parts: Sequence[Part], json_path: Path | None, store: Store, *, full: bool = False) -> None:
    """Run the parts in turn and publish all their figures; a part that breaks is reported and does not cost the others."""
    figures: list[Figure] = []
    with bars() as progress:
        bench = Bench(progress, store, full=full)
        for part in bench.steps(name, parts):
            figures += tried(part.__module__.removeprefix("unskew.benchmarks."), partial(part, bench))
    for pid in collectors(store):
        send_signal(pid, signal.SIGTERM)
    wait_for_collectors(store)
    publish(name, figures, json_path)
    if json_path is not None and (page := draw_growth(figures, json_path)):
        print(f"growth of the planning time: {page}")


def loss_difference(run: FinishedRun, reference: Sequence[float]) -> float:
    """The largest difference of any iteration's loss; infinite when an iteration is missing."""
    if len(run.summary.losses) != len(reference):
        return inf
    return max(abs(mine - other) for mine, other in zip(run.summary.losses, reference, strict=True))
