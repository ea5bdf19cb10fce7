"""Who holds the others up where only collectives and messages are seen, with the waiting inside them.

Under a barrier the culprit is the rank that waits least: a rank's own time in an iteration is the iteration's less the time
covered by its collectives and receives (sends run beside its work), and by the wait between its last collective and the
optimizer. Steps:

1. roles: the members of one gradient group have the same role, one in each replica; where ranks are in several groups, the
   smallest counts. A group of all ranks shows nothing of roles where ranks send each other messages (a pipeline); a rank
   without a group has a role of its own;
2. a rank's own time is expected to be its role's median over iterations and members;
3. the Detector judges own times like chunks: against the expectation, and against the peers of the role.

It does not see lengths: what all replicas share passes for the job's, what one replica's batch costs more must average out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.core.outcome import Findings
from unskew.analytics.detector.detector import Detector, sight_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import equal_roles
from unskew.analytics.detector.residuals import UnitTimes
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import COLLECTIVE_KINDS, Verdict, VerdictClosed

WAITING = (*COLLECTIVE_KINDS, "recv")
LEAST_ITERATIONS = 8
KINDS = ("F",)  # all of a rank's own work is one piece


class OwnTimes(msgspec.Struct, frozen=True):
    """`own_us` [iteration, position in `ranks`]: the iteration less the rank's communication; `role_of`: rank -> role."""

    iterations: tuple[int, ...]
    ranks: tuple[int, ...]
    own_us: Array
    role_of: dict[int, int]


def read_waits(trace: Trace, iterations: pl.DataFrame) -> OwnTimes:
    """From the trace of one plan and `iterations` (iteration, iteration_us). Raises `ValueError` when there is too little to
    compare."""
    spans = trace.operations
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
    roles = _roles(seen, ranks, in_pipeline=bool(trace.kinds & {"send", "recv"}))
    return OwnTimes(tuple(table["iteration"].to_list()), ranks, np.maximum(took[:, None] - waited, 1.0), roles)


def _covered(spans: pl.DataFrame) -> pl.DataFrame:
    """iteration, rank, covered_us: the union of what a rank waited, which may overlap."""
    group = ["iteration", "rank"]
    waits = spans.filter(pl.col("kind").is_in(WAITING)).with_columns(end=pl.col("start_us") + pl.col("wall_us"))
    last = waits.filter(pl.col("kind").is_in(COLLECTIVE_KINDS)).group_by(group).agg(pl.col("end").max().alias("start_us"))
    steps = spans.filter(pl.col("kind") == "optimizer").group_by(group).agg(pl.col("start_us").min().alias("end"))
    barrier = last.join(steps, on=group, how="inner").filter(pl.col("end") > pl.col("start_us"))
    both = [frame.select(*group, "start_us", "end") for frame in (waits, barrier)]
    intervals = pl.concat(both).sort(*group, "start_us")
    before = pl.col("end").cum_max().shift(1).over(group)
    gained = (pl.col("end") - pl.max_horizontal("start_us", before)).clip(lower_bound=0)
    return intervals.with_columns(covered_us=gained).group_by(group).agg(pl.col("covered_us").sum())


def follow_waits(waits: OwnTimes, options: DetectorOptions) -> Findings:
    """The Detector over own times."""
    detector, roles = Detector(options), equal_roles(waits.role_of)
    usual = {
        role: float(np.median(waits.own_us[:, [i for i, rank in enumerate(waits.ranks) if waits.role_of[rank] == role]]))
        for role in set(waits.role_of.values())
    }
    expected_us = np.array([usual[waits.role_of[rank]] for rank in waits.ranks])
    ranks, kind = np.array(waits.ranks), np.zeros(len(waits.ranks), np.int64)
    verdicts: list[Verdict | VerdictClosed] = []
    for iteration, own_us in zip(waits.iterations, waits.own_us, strict=True):
        verdicts += detector.observe_units(iteration, UnitTimes(KINDS, ranks, kind, own_us, expected_us), roles)
    seen = {"seen": "collectives, waiting inside"}
    named = (
        msgspec.structs.replace(verdict, speed={"own": verdict.speed["F"]}, evidence={**verdict.evidence, **seen})
        for verdict in settled(verdicts)
    )
    return Findings(verdicts=tuple(named), sight=sight_of(detector.state, options))


def _roles(seen: pl.DataFrame, ranks: Sequence[int], *, in_pipeline: bool) -> dict[int, int]:
    """rank -> role, by the smallest group of several that it is in."""
    members: dict[str, frozenset[int]] = {
        group: frozenset(of)
        for group, of in seen.filter(pl.col("group").is_not_null() & pl.col("kind").is_in(COLLECTIVE_KINDS))
        .group_by("group").agg(pl.col("rank").unique()).iter_rows()
    }  # fmt: skip
    most = len(ranks) - in_pipeline
    groups = sorted((sorted(of) for of in members.values() if 1 < len(of) <= most), key=lambda of: (len(of), of))
    return {rank: next((of[0] for of in groups if rank in of), rank) for rank in ranks}
