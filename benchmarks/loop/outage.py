"""The collector is killed in the middle of a run and kept away until a rank that turned slow has been named."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence

import msgspec
from support.processes import collectors, send_signal

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun, done
from unskew.collector.events import Event, IterationCommitted, Verdict
from unskew.collector.locks import HeldLock, hold
from unskew.collector.paths import Store

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep", iterations=30)
SEEDS = range(3)
AT = 14


def figures(bench: Bench, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    runs, outages = [], []
    for seed in bench.steps("collector killed and kept away", seeds):
        outage = _Outage(random.Random(seed).uniform(0.0, 0.3))
        fault = f"slow:rank={seed % OPTIONS.ranks},factor=1.8,at={AT}"
        runs.append(bench.run(msgspec.structs.replace(OPTIONS, seed=seed), fault, watch=outage.watch, settle=True))
        outages.append(outage)
    delays = [_delay(run, seed % OPTIONS.ranks) for run, seed in zip(runs, seeds, strict=True)]
    named = sum(delay is not None and delay <= 5 for delay in delays)
    n = len(runs)
    stored = sum(run.summary.events.stored for run in runs)
    return [
        done("collector killed", runs),
        figure(
            "collector killed: events lost", sum(run.lost for run in runs), "", bar=0, better="lower",
            note=f"of {stored} events, {n} runs, kill -9 at a random moment around iteration {AT}",
        ),
        figure("collector killed: events doubled", sum(run.doubled for run in runs), "", bar=0, better="lower"),
        figure(
            "collector killed: slow rank named within 5 iterations while there was none", named, "", bar=n, better="higher",
            note=f"of {n} runs; x1.8, slowed iterations until it was named: {', '.join(map(str, delays))}",
        ),
        figure(
            "collector killed: runs in which none came back before the verdict",
            sum(outage.held_until_verdict for outage in outages), "", bar=n, better="higher",
            note="the collector's lock was taken until then",
        ),
    ]  # fmt: skip


class _Outage:
    """Kills the collector `delay_s` after the iteration before the fault was committed, and holds its lock until a verdict."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._begun = False
        self._lock: HeldLock | None = None
        self.held_until_verdict = False

    def watch(self, store: Store, event: Event) -> None:
        if isinstance(event, IterationCommitted) and event.iteration == AT - 1 and not self._begun:
            self._begun = True
            threading.Timer(self._delay_s, self._begin, (store,)).start()
        elif isinstance(event, Verdict) and self._lock is not None:
            self.held_until_verdict = True
            self._lock.release()
            self._lock = None

    def _begin(self, store: Store) -> None:
        for pid in collectors(store):
            send_signal(pid, signal.SIGKILL)
        self._lock = hold(store.lock("collector"), wait_s=1.0)


def _delay(run: FinishedRun, rank: int) -> int | None:
    """Slowed iterations until the rank was named; None when it was not, or another was."""
    verdicts = run.of(Verdict)
    if not verdicts or [party.rank for party in verdicts[0].culprits] != [rank]:
        return None
    return verdicts[0].at_iteration - AT + 1
