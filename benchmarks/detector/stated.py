"""Is a slowdown of the size that a healthy run states to be the smallest really named? On real cores, with their noise.

Healthy runs are recorded. At several moments the size that is stated then, of a device and of the whole job, is put into the
recording from there on (chunks of one rank, of all ranks, take so many times as long) and judged by the rules that are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.options import options_for
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.predictor.retraining import Retraining
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import TWO_RANKS, Bench
from unskew.collector.events import Event, Verdict
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

RUNS, ITERATIONS = 4, 170
MOMENTS, WITHIN = range(30, 131, 20), 32
BAR = 95


class InjectedSlowness(msgspec.Struct, frozen=True):
    """A slowdown by `stated` of a rank (None: of all) in a healthy recording; None: nothing was stated."""

    rank: int | None
    stated: float | None
    named: bool = False
    another: bool = False


def figures(bench: Bench, runs: int = RUNS, iterations: int = ITERATIONS) -> list[Figure]:
    """Of a device and of the whole job."""
    names = [
        bench.run(msgspec.structs.replace(TWO_RANKS, seed=seed, iterations=iterations)).summary.run_id
        for seed in bench.steps("healthy runs on real cores", range(runs))
    ]
    with open_store(bench.store) as reader:
        found = [one for name in names for one in injected(load_run(reader, name))]
    return [
        *_lines("a device", [one for one in found if one.rank is not None]),
        *_lines("the whole job", [one for one in found if one.rank is None]),
    ]


def _lines(what: str, found: Sequence[InjectedSlowness]) -> list[Figure]:
    known = sorted(one.stated for one in found if one.stated is not None)
    named, another = sum(one.named for one in found), sum(one.another for one in found)
    if not known:
        return [figure(f"stated slowdown of {what}: named", None, "%", bar=BAR, better="higher", note="none was stated")]
    note = f"{named} of {len(known)}, within {WITHIN} iterations, on real cores; stated: median x{known[len(known) // 2]:.2f}, "
    note += f"{known[0]:.2f} to {known[-1]:.2f}; at {len(found) - len(known)} moments none"
    return [
        figure(f"stated slowdown of {what}: named", 100 * named / len(known), "%", bar=BAR, better="higher", note=note),
        figure(f"stated slowdown of {what}: somebody else accused", another, "", bar=0, better="lower"),
    ]


def injected(log: RunLog, moments: Iterable[int] = MOMENTS) -> list[InjectedSlowness]:
    """A slowdown of the size that is stated there, from each moment on, of each rank and of all."""
    monitor, found, at = Monitor(options=options_for(log.device_kind), retraining=Retraining(classes=log.classes)), [], 0
    for moment in moments:
        if moment + WITHIN > len(log.released):
            break
        monitor, _ = _followed(monitor, log.released[at:moment], log.plans)
        at, later = moment, log.released[moment : moment + WITHIN]
        of_device, of_job = monitor.sights
        for rank in (*sorted({chunk.rank for chunk in later[0].committed.chunks}), None):
            stated = (of_job if rank is None else of_device).smallest_slowdown
            if stated is None:
                found.append(InjectedSlowness(rank, None))
                continue
            _, events = _followed(monitor, [slowed(one, rank, stated) for one in later], log.plans)
            culprits = [[party.rank for party in one.culprits] for one in events if isinstance(one, Verdict)]
            wanted = [] if rank is None else [rank]
            found.append(InjectedSlowness(rank, stated, wanted in culprits, any(one not in ([], wanted) for one in culprits)))
    return found


def _followed(
    monitor: Monitor, released: Iterable[IterationTelemetry], plans: Mapping[int, Plan]
) -> tuple[Monitor, list[Event]]:
    events: list[Event] = []
    for one in released:
        monitor, judged = monitor.judge(one, plans[one.committed.plan_version])
        monitor, learned = monitor.learn(judged.sample, judged.verdicts)
        events += [*judged.verdicts, *learned]
    return monitor, events


def slowed(one: IterationTelemetry, rank: int | None, factor: float) -> IterationTelemetry:
    """The iteration as it would be if the rank's chunks (None: everybody's) took `factor` times as long."""
    committed = one.committed
    chunks = tuple(
        msgspec.structs.replace(chunk, us=chunk.us * factor) if rank in (None, chunk.rank) else chunk
        for chunk in committed.chunks
    )
    more_us = sum(slow.us - chunk.us for slow, chunk in zip(chunks, committed.chunks, strict=True))
    measured_us = committed.measured_us * factor if rank is None else committed.measured_us + more_us
    return msgspec.structs.replace(one, committed=msgspec.structs.replace(committed, chunks=chunks, measured_us=measured_us))
