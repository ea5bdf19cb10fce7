"""Iterations of devices that sleep, made up: of the time that ranks had no core most passes beside sleeps, so that it may
explain what an iteration takes beyond the usual one, and never makes the quiet ones look slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.options import SLEEPING
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.predictor.retraining import Retraining
from unskew.collector.events import Event, Verdict, VerdictClosed

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
LAYER_US = {"F": 20.0, "B": 40.0}
STEPS, QUIET_US, END_US, COST = 200, 1000.0, 5_000.0, 0.2
Stretch = tuple[int, int]


def job(
    loads: Sequence[Stretch], slow: tuple[int, int, float] = (0, 0, 1.0), *, seed: int = 0, without_us: float = 45_000.0
) -> tuple[list[Event], Sight]:
    """What is named of the whole job, and what would have been. While there is load every iteration has a rank without a core
    for about so long, of which it is longer by a fifth; in `slow` all of it takes so many times as long, and no chunk does."""
    random = np.random.default_rng(seed)
    monitor, events, (since, until, factor) = Monitor(options=SLEEPING, retraining=Retraining()), list[Event](), slow
    for iteration in range(STEPS):
        works = tuple(work_of(tuple(int(one) for one in random.integers(64, 512, 4))) for _ in PLAN.routes)
        chunks = [
            Chunk(rank=hop.rank, kind=kind, n_layers=hop.n_layers, has_head=hop.rank % 2 == 1, work=work, us=us)
            for route, work in zip(PLAN.routes, works, strict=True)
            for hop in route.hops
            for kind in ("F", "B")
            for us in [LAYER_US[kind] * hop.n_layers * work.tokens / 5 * float(random.lognormal(0, 0.005))]
        ]
        loaded = any(begin <= iteration < end for begin, end in loads)
        lacked_us = without_us * random.uniform(0.5, 1.6) if loaded else QUIET_US * random.uniform(0, 3)
        longest_us = 1.6 * max(sum(one.us for one in chunks if one.rank == rank) for rank in PLAN.ranks)
        own_us = (longest_us + END_US) * float(random.lognormal(0, 0.02)) * (factor if since <= iteration < until else 1.0)
        one = CommittedIteration(
            iteration=iteration,
            plan_version=0,
            chunks=tuple(chunks),
            works=works,
            measured_us=own_us + COST * lacked_us,
            log_complete=True,
        )
        monitor, judged = monitor.judge(IterationTelemetry(committed=one, maybe_coreless_us=lacked_us), PLAN)
        monitor, learned = monitor.learn(judged.sample, judged.verdicts)
        events += [*judged.verdicts, *(event for event in learned if isinstance(event, Verdict | VerdictClosed))]
    return events, monitor.sights[1]


HALF, MIDDLE, ALWAYS, OFTEN = [(0, 100)], [(60, 140)], [(0, STEPS)], [(at, at + 25) for at in range(0, STEPS, 50)]


@pytest.mark.parametrize("loads", [[], HALF, MIDDLE, [(100, STEPS)], ALWAYS, OFTEN])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_load_that_begins_or_ends_is_no_slowdown_of_the_job(loads: Sequence[Stretch], seed: int) -> None:
    events, sight = job(loads, seed=seed)
    assert events == []
    loaded_at_last = loads in ([(100, STEPS)], ALWAYS)
    assert sight.smallest_slowdown is not None
    assert (sight.smallest_slowdown > 1.6) == loaded_at_last  # what would have been seen is less while time may be explained


@pytest.mark.parametrize(
    ("loads", "slow"),
    [
        ([], (100, 150, 1.6)),
        (HALF, (110, 150, 1.6)),
        (HALF, (100, 150, 1.6)),
        (MIDDLE, (80, 130, 1.8)),
        (ALWAYS, (80, 130, 1.8)),
    ],
    ids=["quiet", "after", "as the load ends", "during", "during, always loaded"],
)
def test_a_slowdown_of_the_job_is_named_whatever_the_load(loads: Sequence[Stretch], slow: tuple[int, int, float]) -> None:
    named, over = job(loads, slow)[0]
    assert isinstance(named, Verdict)
    assert isinstance(over, VerdictClosed)
    assert (named.culprits, named.evidence["pattern"]) == ((), "step")
    assert abs(named.since_iteration - slow[0]) <= 2
    assert named.at_iteration - slow[0] < 20
    assert abs(over.until_iteration - slow[1]) <= 2
    assert slow[2] / 1.3 < named.evidence["time_ratio"] < slow[2] * 1.05
