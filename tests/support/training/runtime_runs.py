"""Small real runs for the runtime's tests: a controller in this process, an agent, a zygote, one process per rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from support.processes import collectors, send_signal, started_at
from support.training.warm_processes import forked_agents

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.device_profiles import PROFILES
from unskew.analytics.core.faults import parse_faults
from unskew.analytics.core.plan import chunk_kinds
from unskew.collector.events import DeviceJoined, Event, IterationCommitted, Regrouped, RunFinished
from unskew.collector.files.tail import Entry
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.control.launch import Session
from unskew.runtime.control.summary import Summary
from unskew.runtime.options import RunOptions
from unskew.runtime.size import VOCABULARY

SMALL = RunOptions(
    device="virtual", pp=2, dp=2, layers=4, micro_batches=4, dim=16, heads=1, tokens=64, iterations=12, dtype="float64",
    checkpoint_every=0, respawns=0,
)  # fmt: skip
"""Who is lost stays away, unless a test wants it otherwise."""
for name, times in {"long": 4, "longer": 8, "longest": 16}.items():
    PROFILES[name] = CostModel(chunks={kind: cost.times(times) for kind, cost in PROFILES["steady"].chunks.items()})
"""Devices that take long for little maths: the longer, the less it counts how busy the machine is when a plan changes."""
LONG_CHUNKS = msgspec.structs.replace(SMALL, micro_batches=8, profile="longer", iterations=40)
"""Iterations of some 200 ms of logical time, so that a change of plan repays its cost within the run."""


def light(options: RunOptions) -> RunOptions:
    """The same with layers that compute little: half of a run's CPU. A virtual device takes as long for them, what moves is as
    large, and losses are as exact."""
    layers, shapes = options.layers, ((options.dim,),) * (options.layers - 1) + ((VOCABULARY,),)
    model = f"{Path(__file__).parents[1] / 'jobs' / 'own_models.py'}:light_{layers}"
    return msgspec.structs.replace(options, model=model, layer_weights=(1.0,) * layers, shapes=shapes, kept=(64,) * layers)


_Event = TypeVar("_Event", bound=Event)


class Run:
    """What a run wrote, and which of its ranks stayed the processes they were."""

    def __init__(self, options: RunOptions, on_event: Callable[[Run, Entry], None] | None = None) -> None:
        self.options, self._on_event = options, on_event
        self.events: list[Event] = []
        self.same_process: set[int] = set()
        self._born: dict[int, tuple[int, str]] = {}
        self._session = Session(options, self._take, lambda: None)
        self.id = self._session.run_id
        self.store = Store.locate(options.store)

    def perform(self, *, forked: bool = True) -> Run:
        with forked_agents() if forked else nullcontext():
            self._session.perform()
        return self

    def of(self, kind: type[_Event]) -> list[_Event]:
        """The events of one type, in the order in which the controller saw them."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[float]:
        """Of each committed iteration; all ranks must agree."""
        by_iteration: dict[int, set[float]] = {}
        for event in self.of(IterationCommitted):
            by_iteration.setdefault(event.iteration, set()).add(event.loss)
        assert all(len(losses) == 1 for losses in by_iteration.values())
        assert sorted(by_iteration) == list(range(len(by_iteration)))
        return [by_iteration[iteration].pop() for iteration in sorted(by_iteration)]

    @property
    def summary(self) -> Summary:
        return self._session.summary(None)

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Rows from the store's views; `$run` in the query is this run."""
        with open_store(self.store) as reader:
            rows: list[dict[str, Any]] = reader.sql(query.replace("$run", f"'{self.id}'")).to_dicts()
        return rows

    def _take(self, entry: Entry) -> None:
        event = entry.event
        if event is None:
            return
        self.events.append(event)
        if isinstance(event, DeviceJoined):
            self._born[event.rank] = (event.pid, started_at(event.pid))
        elif isinstance(event, Regrouped):
            self.same_process = {rank for rank, (pid, born) in self._born.items() if born and started_at(pid) == born}
        if self._on_event is not None:
            self._on_event(self, entry)


def train(
    tmp_path: Path,
    *faults: str,
    base: RunOptions = SMALL,
    on_event: Callable[[Run, Entry], None] | None = None,
    collector_stays: bool = False,
    forked: bool = True,
    **options: Any,
) -> Run:
    """A whole run of `base` with `options` replaced, in a store under `tmp_path`; its collector is not left to idle. Not
    `forked`: its agent and zygote are started as for people."""
    chosen = msgspec.structs.replace(base, store=str(tmp_path), **options)
    parsed = parse_faults(faults, ranks=chosen.ranks, iterations=chosen.iterations, schedule=chosen.schedule)
    run = Run(msgspec.structs.replace(chosen, faults=parsed), on_event).perform(forked=forked)
    for pid in () if collector_stays else collectors(run.store):
        send_signal(pid, signal.SIGTERM)
    return run


def assert_exact(run: Run, undisturbed: list[float], survivors: set[int]) -> None:
    """The run is the undisturbed one, executed once, by the processes it began with, and its log lacks nothing."""
    ended = run.of(RunFinished)[-1]
    assert (ended.status, ended.reason) == ("done", "")
    assert run.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    assert run.same_process == survivors
    assert run.sql("select * from executed($run) where times != 1") == []
    (cells,) = run.sql("select count(*) as n from executed($run)")
    kinds = len(chunk_kinds(run.options.schedule))
    assert cells["n"] == kinds * run.options.n_layers * run.options.micro_batches * run.options.iterations
    commits = [(event.iteration, event.rank) for event in run.of(IterationCommitted)]
    assert len(commits) == len(set(commits))
    counts = run.summary.events
    assert (counts.stored, counts.dropped) == (counts.written, 0)


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether `condition` came true in time."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
