"""A replica is lost and returns by FT-HSDP's rules: how long the others stand still, beside ours (in-step, redo).

The sleeping device, so that a chunk takes its time although ranks share cores. All ways see the same deaths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

import msgspec
from support.training.replica_reference import contributions, expected_losses

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun, done
from unskew.collector.events import IterationCommitted, PlanApplied, QuorumFormed, ReplicaStep
from unskew.runtime.options import Recovery, RunOptions

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep", dtype="float64", iterations=60, respawns=3)
AT = 14
DEATHS = ((5, "compute"), (6, "in_sync"))
"""Rank and point of the SPEC, a run of each by each rule; ranks 0 to 3 are the other replica."""
MORE: dict[Recovery, str] = dict.fromkeys(("in-step", "redo"), ", all micro-batches are trained by those who are left")


class Stalls(msgspec.Struct, frozen=True):
    """Of ranks of the other replica: by how many usual iterations the longest time from one commit to the next, around a death
    and around a return, exceeds the usual one, `iteration_s`. None: it did not return."""

    death: float
    back: float | None
    iteration_s: float


def figures(
    bench: Bench, deaths: Sequence[tuple[int, str]] = DEATHS, options: RunOptions = OPTIONS, at: int = AT
) -> list[Figure]:
    """Each death by each rule."""
    runs: dict[Recovery, list[FinishedRun]] = {"ft-hsdp": [], "in-step": [], "redo": []}
    for rank, point in bench.steps("a replica lost and back", deaths):
        for recovery, of in runs.items():
            asked = msgspec.structs.replace(options, recovery=recovery)
            of.append(bench.run(asked, f"kill:rank={rank},at={at},point={point}"))
    theirs = runs["ft-hsdp"]
    stalls = {recovery: [stalls_of(run, at) for run in of] for recovery, of in runs.items()}
    how = f"{options.ranks} ranks, {options.dp} replicas, sleeping device, {len(deaths)} deaths by each of {len(runs)} rules"
    back = [step for run in theirs for step in run.of(ReplicaStep) if step.state == "rejoined"]
    late = [step for run in theirs for step in run.of(ReplicaStep) if step.state == "fetching"]
    ahead = [event.fast for run in theirs for event in run.of(QuorumFormed)]
    return [
        done("replicas", [run for of in runs.values() for run in of], how),
        figure(
            "replicas: largest difference of any iteration's loss from what the rules let expect, float64",
            max(map(off_the_rules, theirs)), "nats", bar=1e-8, better="lower",
            note="computed again in one process from the batches that were trained by the log",
        ),
        figure(
            "replicas: ranks whose state at the end is not their replica peers', bit by bit", sum(map(unequal, theirs)), "",
            bar=0, better="lower",
        ),
        *_stall("a death", {recovery: [one.death for one in of] for recovery, of in stalls.items()}, stalls, None),
        *_stall("a return", {recovery: [one.back for one in of] for recovery, of in stalls.items()}, stalls, 1.0),
        figure(
            "replicas: steps of a replica that is behind until it has caught up, most", len(late) // max(options.pp, 1) + 1, "",
            bar=1, better="lower",
            note=f"a state came in {max((step.fetch_us for step in back), default=0) / 1e6:.3f} s at most",
        ),
        figure(
            "replicas: quorums that were there before they were needed", sum(ahead) / max(len(ahead), 1), "", better="higher",
        ),
    ]  # fmt: skip


def _stall(
    what: str, of: Mapping[Recovery, Sequence[float | None]], stalls: Mapping[Recovery, Sequence[Stalls]], bar: float | None
) -> list[Figure]:
    """One figure for each rule."""
    found = []
    for recovery, measured in of.items():
        known = [one for one in measured if one is not None]
        usual_s = median(one.iteration_s for one in stalls[recovery])
        found.append(
            figure(
                f"replicas: {what} makes a step of the others longer by, {recovery}", max(known, default=None), "iterations",
                bar=bar if recovery == "ft-hsdp" else None, better="lower",
                note=f"longest of {len(known)} of {len(measured)}; an iteration takes {usual_s:.3f} s{MORE.get(recovery, '')}",
            )
        )  # fmt: skip
    return found


def stalls_of(run: FinishedRun, at: int) -> Stalls:
    """What its log shows of the replica that lost nobody."""
    ends: dict[int, int] = {}
    for event in run.of(IterationCommitted):
        if event.rank < run.options.pp:
            ends[event.iteration] = max(ends.get(event.iteration, 0), event.start_us + event.wall_us)
    took = {iteration: (end - ends.get(iteration - 1, end)) / 1e6 for iteration, end in sorted(ends.items())}
    usual = median(took[iteration] for iteration in range(2, at - 1) if iteration in took)
    plans = [event for event in run.of(PlanApplied) if event.iteration > at]
    whole = [event.iteration for event in plans if len(event.plan["roles"]) == run.options.ranks]
    back = None
    if whole:
        back = max(took.get(whole[0] + near, 0.0) for near in (-1, 0, 1)) / usual - 1
    return Stalls(max(took.get(at + near, inf) for near in (-1, 0, 1)) / usual - 1, back, usual)


def off_the_rules(run: FinishedRun) -> float:
    """The largest difference of a loss; infinite where an iteration is missing."""
    expected = expected_losses(run.options, contributions(run.events))
    if len(expected) != len(run.summary.losses):
        return inf
    return max(abs(one - other) for one, other in zip(run.summary.losses, expected, strict=True))


def unequal(run: FinishedRun) -> int:
    """Ranks that end with other bits than the first rank of their stage."""
    last = {
        step.rank: step.digest for step in run.of(ReplicaStep) if step.iteration == run.options.iterations - 1 and step.digest
    }
    return sum(last.get(rank) != last.get(rank % run.options.pp) for rank in range(run.options.ranks))
