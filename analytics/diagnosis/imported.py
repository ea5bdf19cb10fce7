"""An imported run looked at as one that was decided upon: another detector beside today's diagnosis, and the diagnosis of what
had been seen by some iteration. Nothing was decided while it ran, and no predictor is known, as imports have no lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import polars as pl

from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.plan import Plan, Role
from unskew.analytics.core.workload import Work
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.replay.backtest import Beside, DetectorBacktest, compared
from unskew.analytics.replay.causes import ReplayError
from unskew.analytics.replay.method import Method
from unskew.analytics.replay.replay import Replay
from unskew.collector.events import CHUNK_KINDS

_CHUNK = pl.col("kind").is_in(CHUNK_KINDS)
NO_WORK = Work(0, 0)


def beside_diagnosis(log: RunLog, method: Method) -> DetectorBacktest:
    """`method`, a fresh one, shown the chunks and the times of the iterations, beside what `diagnose` says of all of them."""
    beside, plan = Beside(method), plan_of(log)
    for committed in _committed(log):
        beside.observe(committed, plan, None, None)
    return compared(log.run, diagnose(log).verdicts, beside)


def until(log: RunLog, iteration: int | None) -> Replay:
    """What is known after `iteration` (None = the last): nothing was recorded to compare it with. Raises `ReplayError`."""
    numbers = log.iterations["iteration"]
    if not len(numbers):
        raise ReplayError(f"run {log.run} cannot be replayed: it has no iterations")
    first, last = int(numbers[0]), int(numbers[-1])
    if iteration is not None and not first <= iteration <= last:
        raise ReplayError(f"run {log.run} has the iterations {first} to {last}, {iteration} is not among them")
    seen, plan = log if iteration is None else _cut(log, iteration), plan_of(log)
    verdicts = diagnose(seen).verdicts
    return Replay(
        run=log.run,
        until=last if iteration is None else iteration,
        plan=plan,
        alive=plan.ranks,
        speeds={party.rank: one.speed for one in verdicts for party in one.culprits if party.rank is not None and one.speed},
        verdicts=verdicts,
        predictor=None,
        proposals=(),
        compared=0,
        differences=(),
        same_code=False,
    )


def plan_of(log: RunLog) -> Plan:
    """Who holds which stage, a stage taken for a layer; nobody does where no chunks are known by their rank."""
    places = log.trace.operations.filter(_CHUNK).select("rank", "replica", "stage").unique("rank").sort("rank")
    roles = tuple(
        Role(rank=rank, replica=replica if replica is not None else rank, stage=stage or 0, first_layer=stage or 0, n_layers=1)
        for rank, replica, stage in places.iter_rows()
    )
    return Plan(
        plan_version=0, n_layers=1 + max((role.stage for role in roles), default=0), schedule="1f1b", roles=roles, routes=()
    )


def _committed(log: RunLog) -> Iterator[CommittedIteration]:
    chunks = log.trace.operations.filter(_CHUNK).select("iteration", "rank", "kind", "stage", "wall_us")
    of = {int(number): rows for (number,), rows in chunks.group_by("iteration", maintain_order=True)}
    last = chunks["stage"].max()
    for number, iteration_us in log.iterations.select("iteration", "iteration_us").iter_rows():
        rows = of[number].iter_rows() if number in of else ()
        yield CommittedIteration(
            iteration=number,
            plan_version=0,
            chunks=tuple(Chunk(rank, kind, 1, stage == last, NO_WORK, us) for _, rank, kind, stage, us in rows),
            works=(),
            measured_us=float(iteration_us),
            log_complete=True,
        )


def _cut(log: RunLog, iteration: int) -> RunLog:
    """The log up to `iteration`."""
    past = pl.col("iteration") <= iteration
    trace = msgspec.structs.replace(
        log.trace, operations=log.trace.operations.filter(past), iterations=log.trace.iterations.filter(past)
    )
    return msgspec.structs.replace(
        log, trace=trace, iterations=log.iterations.filter(past), steps=log.steps.filter(past), sample=None
    )
