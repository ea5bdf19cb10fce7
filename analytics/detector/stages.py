"""A stage that became more expensive on all of its ranks alike: as devices they excuse each other, as a stage they are named.
So do the ranks of a replica; that it is slow shows in the whole job's time, whose verdict then names it (`SlowReplicas`).

Per group of three or more ranks that hold the same layers, and iteration: s = median over its ranks of what they show over the
prediction, their role and their bias, over all kinds of work. Its excess is the lesser of s and s less the median of the
other groups' s (what all groups share is the batch's or the job's). The same two-sided CUSUM as for devices decides
(cusum.py).
"""

from __future__ import annotations

from math import exp, inf

import msgspec
import numpy as np

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.cusum import CusumLimits, CusumSide, CusumSums
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups, PeerSets, median_of_others
from unskew.analytics.detector.residuals import ALL, Floats, median_of
from unskew.analytics.detector.tracks import ExcessSample, Tracks
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


class SlowReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Whose slowness the whole job's is: in the iterations `first` to `last` the replicas `slowest` took `times` as long as
    their lengths let expect (medians), by kind as `speed` says, and each rank of the `others` less than any of theirs; of the
    `calm` ones of these less than is named: they only wait."""

    slowest: dict[int, tuple[int, ...]]
    others: tuple[int, ...]
    calm: tuple[int, ...]
    first: int
    last: int
    times: tuple[float, ...]
    speed: dict[str, float]

    @property
    def named(self) -> tuple[int, ...]:
        """All alike are nobody."""
        return tuple(self.slowest) if self.others else ()

    def named_in(self, of_job: Verdict) -> Verdict:
        """The verdict on the whole job, as one on these replicas or their data; without others it stays the job's."""
        if not self.others:
            return of_job
        names = " and ".join(replica_words(*named) for named in self.slowest.items())
        their = "its" if len(self.slowest) == 1 else "their"
        return msgspec.structs.replace(
            of_job,
            culprits=tuple(Party(kind="replica", replica=replica) for replica in self.slowest),
            victims=tuple(Party(kind="replica", replica=replica) for replica in self.calm),
            speed=self.speed,
            confidence=min(of_job.confidence, UNDECIDED),
            sentence=(
                f"{names} or {their} data, and the log does not show which: in iterations {self.first} to {self.last} {their} "
                f"ranks took {' and '.join(map(times_as_long, self.times))} as their lengths let expect, the other replicas' "
                f"less; {of_job.sentence}"
            ),
            evidence={
                **of_job.evidence,
                "scope": "replica",
                "ranks": sorted(rank for ranks in self.slowest.values() for rank in ranks),
                "next_step": NEXT_STEP,
            },
        )


def slow_replicas(of_job: Verdict, tracks: Tracks, plan: Plan, options: DetectorOptions) -> SlowReplicas | None:
    """By the iterations that the verdict on the whole job is of; None where they do not show it."""
    seen = [one for one in tracks.recent if of_job.since_iteration <= one.iteration <= of_job.at_iteration]
    return _slowest_in(seen[-of_job.evidence["n"] :], tracks, plan, options)


def slow_replicas_now(of_job: Verdict, tracks: Tracks, plan: Plan, options: DetectorOptions) -> SlowReplicas | None:
    """By the last iterations, and by as many before them alike: who is slow now and then is no news. None where they differ, or
    the verdict on the job is of later ones than the first of these."""
    n = min(2 * options.job_iterations, options.window // 2)
    seen = [one for one in tracks.recent if one.iteration > of_job.at_iteration - of_job.evidence["n"]][-2 * n :]
    before, now = (_slowest_in(of, tracks, plan, options) for of in (seen[:-n], seen[-n:]))
    same = len(seen) == 2 * n and before is not None and now is not None and before.slowest.keys() == now.slowest.keys()
    return now if same else None


def _slowest_in(seen: list[ExcessSample], tracks: Tracks, plan: Plan, options: DetectorOptions) -> SlowReplicas | None:
    """The replicas, of two or more ranks, whose ranks have all taken longer than their lengths let expect, each longer than any
    of the others: lengths are drawn anew, so it is none of them. Those that differ by less than what is named are alike. None
    where there is no such replica, or a rank was seen in less than half of these, and less than `least_iterations`."""
    if not seen:
        return None
    ordered = np.sort(np.stack([one.excess[0] for one in seen]), axis=0)  # nan sorts to the end
    n = (~np.isnan(ordered)).sum(axis=0)
    # [rank, kind], nan = not seen often enough; the lower of two middle values: between them is what no iteration took
    middle = np.take_along_axis(ordered, np.maximum((n - 1) // 2, 0)[None], axis=0)[0]
    middle = np.where(n >= min(options.least_iterations, -(-len(seen) // 2)), middle, np.nan)
    column, rows = tracks.kinds.index(ALL), {rank: row for row, rank in enumerate(tracks.ranks)}
    replicas = {role.replica: tuple(one.rank for one in plan.roles if one.replica == role.replica) for role in plan.roles}
    if any(rank not in rows or np.isnan(middle[rows[rank], column]) for rank in plan.ranks):
        return None
    shown = {one: middle[[rows[rank] for rank in ranks]] for one, ranks in replicas.items()}
    least = {one: float(of[:, column].min()) for one, of in shown.items()}
    line = max(max(least.values()) - options.least_level(), options.least_level())
    slowest, others = [one for one in replicas if least[one] >= line], [one for one in replicas if least[one] < line]
    most = max((float(shown[one][:, column].max()) for one in others), default=-inf)
    if not slowest or most >= min(least[one] for one in slowest) or min(len(replicas[one]) for one in slowest) < 2:
        return None
    of_kind = dict(zip(tracks.kinds, np.median(np.concatenate([shown[one] for one in slowest]), axis=0), strict=True))
    return SlowReplicas(
        slowest={one: replicas[one] for one in slowest},
        others=tuple(others),
        calm=tuple(one for one in others if shown[one][:, column].max() < options.least_level()),
        first=seen[0].iteration,
        last=seen[-1].iteration,
        times=tuple(exp(float(np.median(shown[one][:, column]))) for one in slowest),
        speed={kind: round(exp(-level), 4) for kind, level in of_kind.items() if kind != ALL and not np.isnan(level)},
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
