"""Who holds the others up where only collectives and messages are seen, with the waiting inside them.

Under a barrier the culprit is the rank that waits least: a rank's own time in an iteration is the iteration's less the time
covered by its collectives and receives (sends run beside its work), and by the wait between its last collective and the
optimizer. Steps:

1. roles: the members of one gradient group have the same role, one in each replica; where ranks are in several groups, the
   smallest counts. A group of all ranks shows nothing of roles where ranks send each other messages (a pipeline); a rank
   without a group has a role of its own;
2. waiting for input is no work, and is left out where it is recorded (input_waits.py judges it);
3. own times are judged like those of single workers (detector/workers.py): against the others of the role from the first
   iteration on, and against the rank's own past.

It does not see lengths: what all replicas share passes for the job's, what one replica's batch costs more must average out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.core.outcome import Findings, Sight
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.workers import RankTimes, judge_workers
from unskew.analytics.diagnosis.ranks.input_waits import input_bound, outside_steps
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.collector.events import COLLECTIVE_KINDS

WAITING = (*COLLECTIVE_KINDS, "recv", "data_wait")
LEAST_ITERATIONS = 8
KINDS = ("own",)  # all of a rank's own work is one piece


def read_waits(trace: Trace, iterations: pl.DataFrame) -> RankTimes:
    """From the trace of one plan and `iterations` (iteration, iteration_us). Raises `ValueError` when there is too little to
    compare."""
    spans = trace.operations
    seen = spans.filter(pl.col("kind").is_in([*COLLECTIVE_KINDS, "recv"]))
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
    return RankTimes(KINDS, tuple(table["iteration"].to_list()), roles, np.maximum(took[:, None] - waited, 1.0)[None])


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


def follow_collectives(log: RunLog, options: DetectorOptions) -> tuple[list[Findings], list[str]]:
    """Who waits least, and who waits for input, plan by plan (another plan gives ranks other work); and which plans do not show
    it."""
    judged: list[Findings] = []
    problems = []
    for plan_version in log.trace.plan_versions:
        trace = log.trace.of_plan(plan_version)
        inputs = input_bound(trace, log.iterations, options)
        why = outside_steps(trace, log.steps)
        try:
            findings = follow_waits(read_waits(trace, log.iterations), options) if not why else Findings(sight=_blind(why))
        except ValueError as error:
            why, findings = str(error), Findings(sight=_blind(str(error)))
        problems += [f"slow_device under plan {plan_version}: {why}"] if why else []
        before = sum(len(one.verdicts) for one in judged)
        found = enumerate((*inputs, *findings.verdicts), start=before + 1)
        numbered = tuple(msgspec.structs.replace(one, verdict=number) for number, one in found)
        judged.append(msgspec.structs.replace(findings, verdicts=numbered))
    return judged, problems


def _blind(why: str) -> Sight:
    return Sight(scope="device", smallest_slowdown=None, why=why)


def follow_waits(waits: RankTimes, options: DetectorOptions) -> Findings:
    """What own times show."""
    found = judge_workers(waits, options, equal_work=True)
    seen = {"seen": "collectives, waiting inside"}
    verdicts = tuple(msgspec.structs.replace(one, evidence={**one.evidence, **seen}) for one in found.verdicts)
    return msgspec.structs.replace(found, verdicts=verdicts)


def _roles(seen: pl.DataFrame, ranks: Sequence[int], *, in_pipeline: bool) -> dict[int, int]:
    """rank -> role, by the smallest group of several that it is in; collectives of which no group is recorded are of one."""
    members: dict[str, frozenset[int]] = {
        group: frozenset(of)
        for group, of in seen.filter(pl.col("kind").is_in(COLLECTIVE_KINDS)).with_columns(pl.col("group").fill_null(""))
        .group_by("group").agg(pl.col("rank").unique()).iter_rows()
    }  # fmt: skip
    most = len(ranks) - in_pipeline
    groups = sorted((sorted(of) for of in members.values() if 1 < len(of) <= most), key=lambda of: (len(of), of))
    return {rank: next((of[0] for of in groups if rank in of), rank) for rank in ranks}
