"""Who holds the others up where only collectives and messages are seen, with the waiting inside them.

Under a barrier the culprit is the rank that waits least: a rank's own time in an iteration is the iteration's less the time
covered by its collectives and receives (sends run beside its work), and by the wait between its last collective and the
optimizer. Steps:

1. roles: the members of one gradient group have the same role, one in each replica; where ranks are in several groups, the
   smallest counts. A group of all ranks says nothing of roles where ranks send each other messages (a pipeline); a rank without
   a group has a role of its own;
2. a rank's own time is expected to be its role's median over iterations and members;
3. the Detector judges own times like chunks: against the expectation, and against the peers of the role.

It does not see lengths: what all replicas share passes for the job's, what one replica's batch costs more must average out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.plan import Hop, Plan, Role, Route
from unskew.analytics.core.workload import Work
from unskew.analytics.detector.detector import Detector
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.failslow import AS_EXPECTED, settled
from unskew.analytics.diagnosis.trace.graph import Array
from unskew.analytics.diagnosis.trace.spans import COLLECTIVES
from unskew.collector.events import Verdict, VerdictClosed

WAITING = (*COLLECTIVES, "recv")
LEAST_ITERATIONS = 8


class OwnTimes(msgspec.Struct, frozen=True):
    """`own_us` [iteration, position in `ranks`]: the iteration less the rank's communication; `role_of`: rank -> role."""

    iterations: tuple[int, ...]
    ranks: tuple[int, ...]
    own_us: Array
    iteration_us: Array
    role_of: dict[int, int]


def read_waits(spans: pl.DataFrame, iterations: pl.DataFrame) -> OwnTimes:
    """From spans and `iterations` (iteration, iteration_us). Raises `ValueError` when there is too little to compare."""
    seen = spans.filter(pl.col("kind").is_in(WAITING))
    ranks = tuple(seen["rank"].unique().sort().to_list())
    table = (
        _covered(spans).pivot("rank", index="iteration", values="covered_us").sort("iteration").drop_nulls()
        .join(iterations.drop_nulls(), on="iteration", how="inner")
    )  # fmt: skip
    if table.height < LEAST_ITERATIONS or len(ranks) < 2:
        raise ValueError(
            f"{table.height} iterations of {len(ranks)} ranks with all collective times, needed are {LEAST_ITERATIONS} of 2"
        )
    took = table["iteration_us"].cast(pl.Float64).to_numpy()
    waited = table.select([str(rank) for rank in ranks]).cast(pl.Float64).to_numpy()
    roles = _roles(seen, ranks, in_pipeline=bool(spans["kind"].is_in(["send", "recv"]).any()))
    return OwnTimes(tuple(table["iteration"].to_list()), ranks, np.maximum(took[:, None] - waited, 1.0), took, roles)


def _covered(spans: pl.DataFrame) -> pl.DataFrame:
    """iteration, rank, covered_us: the union of what a rank waited, which may overlap."""
    group = ["iteration", "rank"]
    waits = spans.filter(pl.col("kind").is_in(WAITING)).with_columns(end=pl.col("start_us") + pl.col("wall_us"))
    last = waits.filter(pl.col("kind").is_in(COLLECTIVES)).group_by(group).agg(pl.col("end").max().alias("start_us"))
    steps = spans.filter(pl.col("kind") == "optimizer").group_by(group).agg(pl.col("start_us").min().alias("end"))
    barrier = last.join(steps, on=group, how="inner").filter(pl.col("end") > pl.col("start_us"))
    both = [frame.select(*group, "start_us", "end") for frame in (waits, barrier)]
    intervals = pl.concat(both).sort(*group, "start_us")
    before = pl.col("end").cum_max().shift(1).over(group)
    gained = (pl.col("end") - pl.max_horizontal("start_us", before)).clip(lower_bound=0)
    return intervals.with_columns(covered_us=gained).group_by(group).agg(pl.col("covered_us").sum())


def follow_waits(waits: OwnTimes, options: DetectorOptions) -> tuple[Verdict, ...]:
    """The Detector over own times."""
    detector = Detector(options)
    plan = _plan(waits)
    expected = {
        role: float(np.median(waits.own_us[:, [i for i, rank in enumerate(waits.ranks) if waits.role_of[rank] == role]]))
        for role in set(waits.role_of.values())
    }
    said: list[Verdict | VerdictClosed] = []
    for row, iteration in enumerate(waits.iterations):
        chunks = tuple(
            Chunk(
                rank=rank, kind="F", n_layers=1, has_head=False, work=Work(max(round(expected[waits.role_of[rank]]), 1), 0),
                us=float(waits.own_us[row, i]),
            )
            for i, rank in enumerate(waits.ranks)
        )  # fmt: skip
        committed = CommittedIteration(
            iteration=iteration, plan_version=0, chunks=chunks, works=(Work(1, 0),) * len(plan.routes),
            measured_us=float(waits.iteration_us[row]), log_complete=True,
        )  # fmt: skip
        said += detector.observe(committed, plan, AS_EXPECTED).verdicts
    seen = {"seen": "collectives, waiting inside"}
    return tuple(
        msgspec.structs.replace(verdict, speed={"own": verdict.speed["F"]}, evidence={**verdict.evidence, **seen})
        for verdict in settled(said)
    )


def _roles(seen: pl.DataFrame, ranks: Sequence[int], *, in_pipeline: bool) -> dict[int, int]:
    """rank -> role, by the smallest group of several that it is in."""
    members: dict[str, frozenset[int]] = {
        group: frozenset(of)
        for group, of in seen.filter(pl.col("group").is_not_null() & pl.col("kind").is_in(COLLECTIVES))
        .group_by("group").agg(pl.col("rank").unique()).iter_rows()
    }  # fmt: skip
    most = len(ranks) - in_pipeline
    groups = sorted((sorted(of) for of in members.values() if 1 < len(of) <= most), key=lambda of: (len(of), of))
    return {rank: next((of[0] for of in groups if rank in of), rank) for rank in ranks}


def _plan(waits: OwnTimes) -> Plan:
    """Roles as stages, their members as replicas: who is compared with whom."""
    stages = sorted(set(waits.role_of.values()))
    members: Mapping[int, list[int]] = {stage: [r for r in waits.ranks if waits.role_of[r] == stage] for stage in stages}
    roles = tuple(
        Role(rank=rank, replica=replica, stage=number, first_layer=number, n_layers=1)
        for number, stage in enumerate(stages)
        for replica, rank in enumerate(members[stage])
    )
    hops = tuple(Hop(first_layer=number, n_layers=1, ranks=(members[stage][0],)) for number, stage in enumerate(stages))
    return Plan(
        plan_version=0, n_layers=len(stages), schedule="1f1b", roles=roles, routes=(Route(micro_batch=0, replica=0, hops=hops),)
    )
