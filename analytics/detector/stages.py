"""A stage that became more expensive on all of its ranks alike: as devices they excuse each other, as a stage they are named.
So do the ranks of a replica; that it is slow shows in the whole job's time, whose verdict then names it (`of_replica`).

Per group of three or more ranks that hold the same layers, and iteration: s = median over its ranks of what they show over the
prediction, their role and their bias, over all kinds of work. Its excess is the lesser of s and s less the median of the
other groups' s (what all groups share is the batch's or the job's). The same two-sided CUSUM as for devices decides
(cusum.py).
"""

from __future__ import annotations

from math import exp

import msgspec
import numpy as np

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.cusum import CusumLimits, CusumSide, CusumSums
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, PeerSets, median_of_others
from unskew.analytics.detector.residuals import ALL, Floats, median_of
from unskew.analytics.detector.tracks import Tracks
from unskew.analytics.detector.verdicts import UNDECIDED, confidence_of, replica_words
from unskew.collector.events import Party, Verdict, VerdictClosed

LEAST_RANKS = 3
NEXT_STEP = (
    "tell the two apart: measure its devices by themselves, or give the replica another one's data for some iterations (a slow "
    "replica stays slow)"
)


class Stages(msgspec.Struct, frozen=True):
    """What is remembered of the groups of the plan of this digest: arrays [group]; `recent`: (iteration, excess)."""

    digest: str
    sums: CusumSums
    level: Floats
    recent: tuple[tuple[int, Floats], ...]
    open: dict[int, int]

    @staticmethod
    def fresh(company: PeerGroups, iteration: int) -> Stages:
        n = len(company.peer_groups.members)
        return Stages(company.digest, CusumSums.fresh((n,), iteration), np.zeros(n), (), {})


def watch(
    stages: Stages, company: PeerGroups, own: Floats, *, now: int, sigma: float, number: int, options: DetectorOptions
) -> tuple[Stages, tuple[Verdict | VerdictClosed, ...]]:
    """One iteration further. `own` [rank]: over all kinds of work, nan = not seen or its past not known; `sigma` its noise;
    `number`: of the next verdict."""
    if len(stages.level) < 2 or company.peer_groups.members.shape[1] < LEAST_RANKS:  # no stage can be judged
        return stages, ()
    excess = _excess(company, own)
    slack, threshold = options.slack_of(sigma), options.threshold_of(sigma, 1)
    limits = CusumLimits(np.asarray(slack), np.asarray(threshold), options.least_iterations)
    over = excess - stages.level
    sums = stages.sums.advance(now, over, over, limits)
    recent = (*stages.recent[1 - options.window :], (now, excess))
    verdicts: list[Verdict | VerdictClosed] = []
    level, opened = stages.level.copy(), dict(stages.open)
    judged = np.zeros(len(level), dtype=bool)
    for group in np.flatnonzero((sums.up.total > threshold) | (sums.down.total > threshold)).tolist():
        side = sums.up if sums.up.total[group] > threshold else sums.down
        rows = [(at, float(seen[group])) for at, seen in recent if at > side.zero_at[group] and not np.isnan(seen[group])]
        if len(rows) < options.least_iterations:
            continue
        found = float(np.median([value for _, value in rows]))
        slow = found >= options.least_level()
        judged[group] = True
        level[group] = found if slow else 0.0
        if slow:
            opened.setdefault(group, number)
            number = max(number, opened[group] + 1)
            ranks = [company.ranks[row] for row in company.peer_groups.members[group].tolist() if row >= 0]
            others = [rank for rank in company.ranks if rank not in ranks]
            verdicts.append(
                stage_verdict(
                    opened[group], company.stage_of[ranks[0]], ranks, others, found, since=rows[0][0], at=now, n=len(rows),
                    sigma=sigma, options=options,
                )
            )  # fmt: skip
        elif group in opened:
            reason = f"the stage takes as long as predicted since iteration {rows[0][0]}"
            closed = VerdictClosed(verdict=opened.pop(group), until_iteration=rows[0][0], at_iteration=now, reason=reason)
            verdicts.append(closed)
    sums = sums.each(lambda side: CusumSide(np.where(judged, 0.0, side.total), side.zero_at))
    return Stages(stages.digest, sums, level, recent, opened), tuple(verdicts)


def stage_verdict(
    number: int, stage: int, ranks: list[int], others: list[int], level: float, *, since: int, at: int, n: int, sigma: float,
    options: DetectorOptions,
) -> Verdict:  # fmt: skip
    """All `ranks` of the stage take longer alike, by `level` (log) in `n` iterations of noise `sigma`."""
    times = exp(level)
    return Verdict(
        verdict=number,
        cause="stage_imbalance",
        culprits=(Party(kind="stage", stage=stage),),
        victims=tuple(Party(kind="device", rank=rank) for rank in others),
        since_iteration=since,
        at_iteration=at,
        confidence=confidence_of(level - options.slack_of(sigma), sigma, n),
        sentence=(
            f"the work of stage {stage} became dearer, no single device is to blame: on all of its {len(ranks)} ranks alike it "
            f"takes {times_as_long(times)} as predicted since iteration {since}"
        ),
        evidence={"time_ratio": round(times, 4), "sigma": round(sigma, 4), "n": n, "ranks": ranks},
        config=options.digest,
    )


def of_replica(of_job: Verdict, tracks: Tracks, plan: Plan, options: DetectorOptions) -> Verdict:
    """The verdict on the whole job, as one on a replica or its data where the ranks of one, two or more, have all taken longer
    than their lengths let expect in the iterations that it is of, and those of others, that are known too, have not: lengths
    are drawn anew, so it is none of them."""
    seen = [one for one in tracks.recent if of_job.since_iteration <= one.iteration <= of_job.at_iteration]
    seen = seen[-of_job.evidence["n"] :]
    if not seen:
        return of_job
    middle = np.median(np.stack([one.excess[0] for one in seen]), axis=0)  # [rank, kind], nan = not seen in each of them
    levels = dict(zip(tracks.ranks, middle[:, tracks.kinds.index(ALL)].tolist(), strict=True))
    replicas = {role.replica: [one.rank for one in plan.roles if one.replica == role.replica] for role in plan.roles}
    least = options.least_level()
    slow = [one for one, ranks in replicas.items() if all(levels.get(rank, np.nan) >= least for rank in ranks)]
    others = [rank for one, ranks in replicas.items() if one not in slow for rank in ranks]
    if len(slow) != 1 or len(ranks := replicas[slow[0]]) < 2 or not others:
        return of_job
    if not all(levels.get(rank, np.nan) < least for rank in others):
        return of_job
    times = exp(min(levels[rank] for rank in ranks))
    of_kind = dict(zip(tracks.kinds, np.median(middle[[tracks.ranks.index(rank) for rank in ranks]], axis=0), strict=True))
    return msgspec.structs.replace(
        of_job,
        culprits=(Party(kind="replica", replica=slow[0]),),
        victims=tuple(Party(kind="replica", replica=one) for one in replicas if one not in slow),
        speed={kind: round(exp(-level), 4) for kind, level in of_kind.items() if kind != ALL and not np.isnan(level)},
        confidence=min(of_job.confidence, UNDECIDED),
        sentence=(
            f"{replica_words(slow[0], ranks)} or its data, and the log does not show which: in iterations {seen[0].iteration} "
            f"to {seen[-1].iteration} all its ranks took {times_as_long(times)} as their lengths let expect, no other "
            f"replica's did; {of_job.sentence}"
        ),
        evidence={**of_job.evidence, "scope": "replica", "ranks": ranks, "next_step": NEXT_STEP},
    )


def at_its_end(shown: Verdict, of_job: Verdict) -> Verdict:
    """An episode's last revision `of_job`, of all its iterations: whose it is stays what was last `shown`, which says of which
    iterations."""
    whose, _, _ = shown.sentence.rpartition("; ")
    return msgspec.structs.replace(
        shown,
        at_iteration=of_job.at_iteration,
        sentence="; ".join(filter(None, (whose, of_job.sentence))),
        evidence={**shown.evidence, "time_ratio": of_job.evidence["time_ratio"]},
    )


def suspected(stages: Stages | None, company: PeerGroups) -> set[int]:
    """Ranks of stages that are more expensive, or may be: what they show now is no bias."""
    if stages is None or stages.digest != company.digest:
        return set()
    groups = {*stages.open, *np.flatnonzero(stages.sums.up.total > 0).tolist()}
    return {company.ranks[row] for group in groups for row in company.peer_groups.members[group].tolist() if row >= 0}


def ended(stages: Stages, now: int) -> tuple[VerdictClosed, ...]:
    """The plan has changed: what was open against its stages is no longer about anything."""
    return tuple(
        VerdictClosed(verdict=number, until_iteration=now, at_iteration=now, reason="another plan: the stages are others")
        for _, number in sorted(stages.open.items())
    )


def _excess(company: PeerGroups, own: Floats) -> Floats:
    """[group], nan for a group of fewer than three ranks that speak, or without another group beside it."""
    members = company.peer_groups.members
    inside = np.sort(np.where(members >= 0, own[members], np.nan), axis=1)  # nan sorts to the end
    count = (~np.isnan(inside)).sum(axis=1)
    middle = np.full((len(members), 1), np.nan)
    for group in np.flatnonzero(count >= LEAST_RANKS).tolist():
        middle[group] = median_of(inside[group, : count[group]])
    together = PeerSets(np.arange(len(members))[None, :], np.zeros(len(members), dtype=np.int64))
    others, _ = median_of_others(middle, together)
    return np.asarray(np.minimum(middle, middle - others)[:, 0])
