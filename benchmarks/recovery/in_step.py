"""A rank dies within an iteration: what is executed again, and how long it takes, in-step against redoing the iteration.

The sleeping device, so that a chunk takes its time although ranks share cores. Both ways see the same deaths.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

import msgspec
from support.processes import send_signal

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun, Watch, done, loss_difference
from unskew.collector.events import DeviceJoined, DeviceLost, Event, IterationCommitted, Regrouped
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.options import Recovery, RunOptions

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep", dtype="float64", iterations=16)
AT = 6
DEATHS = {
    "by the barrier, where all others are": ("before_barrier", (0, 4)),
    "by the barrier, others in their last backward passes": ("before_barrier", (3, 6)),
    "before its last bucket is reduced": ("in_sync", (1, 6)),
    "among its chunks": ("compute", (3, 4)),
}
"""Name -> the point of the SPEC, and the ranks that die, each in a run of its own. Stage 0 (ranks 0 and 4) ends last."""
PAIRS = ((0, 5), (3, 4), (6, 1))
"""Two ranks of one run, of which the survivors still hold every layer; the second dies within 120 ms of the first."""


class Death(msgspec.Struct, frozen=True):
    """Chunks that were executed in later attempts, and the time from the noticed death to the iteration's commit."""

    redone: int
    seconds: float


def figures(
    bench: Bench,
    deaths: Mapping[str, tuple[str, tuple[int, ...]]] = DEATHS,
    pairs: Sequence[tuple[int, int]] = PAIRS,
    options: RunOptions = OPTIONS,
) -> list[Figure]:
    """A failure-free reference; each death both ways; then pairs of deaths in-step."""
    reference = bench.run(options).summary.losses
    runs: list[FinishedRun] = []
    found: list[Figure] = []
    for what, (point, ranks) in deaths.items():
        methods: dict[Recovery, list[Death]] = {"in-step": [], "redo": []}
        for rank in bench.steps(f"deaths {what}", ranks):
            for recovery, measured in methods.items():
                asked = msgspec.structs.replace(options, recovery=recovery)
                runs.append(bench.run(asked, f"kill:rank={rank},at={AT},point={point}"))
                measured.append(death(runs[-1]))
        found += _compared(what, methods, options)
    doubles = []
    for first, second in bench.steps("two deaths", pairs):
        watch = _killer(second, random.Random(f"{first}/{second}").uniform(0.0, 0.12))
        doubles.append(bench.run(options, f"kill:rank={first},at={AT},point=before_barrier", watch=watch))
    runs += doubles
    seconds = [event.seconds for run in doubles for event in run.of(Regrouped) if event.plan_version > 0]
    of_all = [event.seconds for run in runs for event in run.of(Regrouped) if event.plan_version > 0]
    how = f"{options.ranks} ranks, {options.iterations} iterations each, sleeping device; {len(doubles)} with two deaths"
    return [
        done("recovery", runs, how),
        figure(
            "recovery: largest difference of any iteration's loss, float64",
            max(loss_difference(run, reference) for run in runs), "nats",
            bar=1e-8, better="lower", note="against the failure-free run of the same seed",
        ),
        figure(
            "recovery: (layer, micro-batch, F or B) that does not count exactly once", sum(run.not_once for run in runs), "",
            bar=0, better="lower", note="from the log: what was kept counts where it was executed",
        ),
        *found,
        figure(
            "recovery: from a death to regrouped, two within 120 ms included, median", median(of_all) if of_all else None, "s",
            bar=0.1, better="lower", note=f"longest {max(of_all, default=0):.3f} s of {len(of_all)}",
        ),
        figure(
            "recovery: two deaths within 120 ms, from a death to regrouped, longest", max(seconds, default=None), "s",
            bar=0.5, better="lower", note=f"median {median(seconds):.3f} s of {len(seconds)}" if seconds else "",
        ),
    ]  # fmt: skip


def _compared(what: str, methods: Mapping[Recovery, Sequence[Death]], options: RunOptions) -> list[Figure]:
    """The medians of both ways."""
    chunks = 2 * options.pp * options.micro_batches
    by_all = what.startswith("by the barrier, where all")
    redone = {recovery: max(one.redone for one in measured) for recovery, measured in methods.items()}
    seconds = {recovery: median(one.seconds for one in measured) for recovery, measured in methods.items()}
    return [
        figure(
            f"recovery: death {what}: chunks executed again, most", redone["in-step"], "", bar=0 if by_all else None,
            better="lower", note=f"redoing {redone['redo']} of {chunks}; {len(methods['redo'])} runs each",
        ),
        figure(
            f"recovery: death {what}: time to the commit, of that of redoing", seconds["in-step"] / seconds["redo"], "",
            bar=0.5 if by_all else None, better="lower",
            note=f"medians from the noticed death: {seconds['in-step']:.3f} s, redoing {seconds['redo']:.3f} s",
        ),
    ]  # fmt: skip


def death(run: FinishedRun) -> Death:
    """What iteration `AT` cost after its death."""
    with open_store(Store.locate(run.options.store)) as reader:
        query = "select count(*) from chunks where run = $run and iteration = $at and attempt > 0"
        redone = reader.sql(query, {"run": run.summary.run_id, "at": AT}).item()
    commits = [event for event in run.of(IterationCommitted) if event.iteration == AT]
    end_us = max((event.start_us + event.wall_us for event in commits), default=inf)
    return Death(redone, (end_us - min(event.detected_us for event in run.of(DeviceLost))) / 1e6)


def _killer(rank: int, delay_s: float) -> Watch:
    """Kill `rank` from outside, `delay_s` after the loss of another was logged."""
    pids: dict[int, int] = {}

    def watch(_: Store, event: Event) -> None:
        if isinstance(event, DeviceJoined):
            pids[event.rank] = event.pid
        elif isinstance(event, DeviceLost) and rank in pids:
            threading.Timer(delay_s, send_signal, (pids.pop(rank), signal.SIGKILL)).start()

    return watch
