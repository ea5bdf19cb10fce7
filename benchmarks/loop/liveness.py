"""How soon a lost rank is named, and whether a busy machine ever makes a healthy one look lost: 16 busy ranks on its cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import nan
from statistics import median

import msgspec
import numpy as np

from unskew.benchmarks.loop.exits import ExitWatch
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.events import DeviceJoined, DeviceLost, Event, FaultInjected, Heartbeat, Suspected
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.options import RunOptions
from unskew.runtime.placement import cores

BUSY = RunOptions(device="real", pp=4, dp=4, layers=8, micro_batches=16, dim=64, heads=2, tokens=256, iterations=30, respawns=0)
"""Real maths on every rank: most are ready to run and have no core most of the time."""
RANKS = (2, 7, 13)
BARS_S = {"kill": 0.05, "hang": 1.0, "freeze": 1.0}
HOW = {"kill": "exit", "hang": "hung", "freeze": "frozen"}
QUIET_S = 1200.0
_PART = 200


def figures(bench: Bench, ranks: Sequence[int] = RANKS, options: RunOptions = BUSY, quiet_s: float = QUIET_S) -> list[Figure]:
    """Each kind of loss in turn; then the same job without any, again and again until `quiet_s` have passed."""
    found = []
    where = f"{options.ranks} busy ranks on {cores()} cores"
    for kind, bar_s in BARS_S.items():
        cases = [_case(bench, options, kind, rank) for rank in bench.steps(f"{kind}, busy ranks", ranks)]
        delays = [case.delay_s for case in cases if case.delay_s is not None]
        longest_s = max(delays) if len(delays) == len(cases) else None
        since = "exit" if kind == "kill" else kind
        named = sum(case.named == [(rank, HOW[kind])] for rank, case in zip(ranks, cases, strict=True))
        announced = median([case.since_announced_s for case in cases if case.since_announced_s is not None] or [nan])
        also = f"; from the signal, before the kernel has taken the process down, {announced:.3f} s" if kind == "kill" else ""
        found += [
            figure(
                f"liveness: from the {since} to its name, longest", longest_s, "s",
                bar=bar_s, better="lower",
                note=f"median {median(delays or [nan]):.3f} s of {len(delays)} named of {len(cases)}{also}; {where}",
            ),
            figure(
                f"liveness: {kind} told from the others, and nobody else named", named, "", bar=len(cases), better="higher",
            ),
        ]  # fmt: skip
    return [*found, *_quiet(bench, options, quiet_s, where)]


class _Case(msgspec.Struct, frozen=True):
    """Who was named lost and how; seconds from the loss to its name, and from its announcement by the rank, as logged."""

    named: list[tuple[int, str]]
    delay_s: float | None
    since_announced_s: float | None


def _case(bench: Bench, options: RunOptions, kind: str, rank: int) -> _Case:
    watches: list[ExitWatch] = []

    def watch(_: Store, event: Event) -> None:
        if kind == "kill" and isinstance(event, DeviceJoined) and event.rank == rank:
            watches.append(ExitWatch(event.pid))

    run = bench.run(options, f"{kind}:rank={rank},at={10 + rank}", watch=watch)
    query = "select min(at_us) from events where run = $run and rank = $rank and (type ^@ 'suspected' or type ^@ 'device_lost')"
    with open_store(Store.locate(run.options.store)) as reader:
        named_us = reader.sql(query, {"run": run.summary.run_id, "rank": rank}).item()
    announced_us = next((fault.announced_us for fault in run.of(FaultInjected) if fault.rank == rank), None)
    since_us = watches[0].ended_us() if watches else announced_us
    return _Case(
        named=[(lost.rank, lost.how) for lost in run.of(DeviceLost)],
        delay_s=None if named_us is None or since_us is None else (named_us - since_us) / 1e6,
        since_announced_s=None if named_us is None or announced_us is None else (named_us - announced_us) / 1e6,
    )


def _quiet(bench: Bench, options: RunOptions, seconds: float, where: str) -> list[Figure]:
    """No fault: whoever is named is named wrongly."""
    gaps_s: list[float] = []
    named, began_s = 0, time.monotonic()
    part = msgspec.structs.replace(options, iterations=_PART)
    for _ in bench.steps(f"busy and healthy for {seconds:.0f} s", range(max(1, round(seconds / 60)))):
        if time.monotonic() - began_s >= seconds:
            break
        run = bench.run(part)
        named += len(run.of(DeviceLost)) + len(run.of(Suspected))
        gaps_s += [event.longest_gap_us / 1e6 for event in run.of(Heartbeat) if event.longest_gap_us is not None]
    lasted_s = time.monotonic() - began_s
    at = np.quantile(gaps_s, (0.5, 0.99, 1.0)) if gaps_s else np.zeros(3)
    return [
        figure(
            "liveness: healthy ranks called lost", named, "", bar=0, better="lower",
            note=f"in {lasted_s / 60:.1f} minutes; {where}; longest pause between two heartbeats of a rank and second: median "
            f"{1e3 * at[0]:.0f} ms, 99 % {1e3 * at[1]:.0f} ms, longest {1e3 * at[2]:.0f} ms",
        )
    ]  # fmt: skip
