"""Ranks that should take the same, side by side over their last iterations: what a detector of changes cannot see.

For a training that is not ours: there a rank may be slow from its first iteration on, in its loader, its optimizer or whatever
the loop does between. Three readings of one window of iterations (docs/guide/watch.md):

1. a rank's forward and backward time over what its lengths let expect, its optimizer's and its other time, each against the
   other ranks' of the same iteration (detector/workers.py); it is named when it costs `LEAST_SHARE` of the iteration as well;
2. waiting for data, and collecting garbage: what a rank does of it beyond the one that does least;
3. lengths: a rank that is always given more work than the others is slow by no fault of its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats, median_of
from unskew.analytics.detector.verdicts import devices
from unskew.analytics.detector.workers import LEAST_US, RankTimes, judge_workers, level_of_few
from unskew.analytics.predictor.fit import expected_us
from unskew.collector.events import Cause, Verdict

LEAST_SHARE = 0.05
"""What costs less of an iteration is not named."""
FEW, LOOKED_AT = 6, (6, 8, 11, 16)
"""So few iterations may suffice where the slowdown is large; a glance at the last so many shows whether to compare now."""
SPIKES = 0.1
"""This part of the iterations, those with the longest waits for data, is left out."""
FEW_LENGTHS = 3
"""By so few what they cost and how fast the ranks are that are given them are one and the same."""
IDLE: dict[str, tuple[Cause, float, str]] = {
    "data_wait": ("input_bound", SPIKES, "waiting for input"), "gc": ("gc_pause", 0.0, "collecting garbage")
}  # fmt: skip
"""What is no work of a device: its cause, the part of the iterations that is left out, how it is called."""
CHUNKS, BESIDE = ("F", "B"), ("optimizer", "other")


class Comparison(msgspec.Struct, frozen=True):
    """Verdicts, numbered from 1, and what (1) would have seen."""

    verdicts: tuple[Verdict, ...]
    sight: Sight


class RankWindow(msgspec.Struct, frozen=True):
    """`stage_of`: rank -> stage, those of one stage do the same work; `measured_us` [iteration]; `us` kind ->
    [iteration, rank], own times; `expected_us` the same for the chunks whose lengths are known, all of them or none."""

    stage_of: dict[int, int]
    iterations: tuple[int, ...]
    measured_us: Floats
    us: Mapping[str, Floats]
    expected_us: Mapping[str, Floats]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.stage_of)

    @property
    def iteration_us(self) -> float:
        """The usual iteration."""
        return float(np.median(self.measured_us)) if len(self.measured_us) else 0.0

    def over_others(self, of: Floats, rank: int) -> Floats | None:
        """`of` [iteration, rank] of a rank and the median of the others of its stage, [2, iteration]; None = there are none."""
        columns = [at for at, (one, stage) in enumerate(self.stage_of.items()) if stage == self.stage_of[rank] and one != rank]
        own = of[:, self.ranks.index(rank)]
        return np.stack([own, np.median(of[:, columns], axis=1)]) if columns else None


def window_of(seen: Sequence[IterationTelemetry], plan: Plan, cost: CostModel | None) -> RankWindow:
    """The complete iterations of `seen`."""
    ranks = plan.ranks
    whole = [one for one in seen if one.committed.log_complete]
    shape = (len(whole), len(ranks))
    column = {rank: index for index, rank in enumerate(ranks)}
    us = {kind: np.zeros(shape) for kind in (*CHUNKS, *BESIDE, *IDLE)}
    expected = {kind: np.zeros(shape) for kind in CHUNKS}
    for row, one in enumerate(whole):
        for chunk in one.committed.chunks:
            us[chunk.kind][row, column[chunk.rank]] += chunk.us
            if cost is not None and chunk.work.tokens:
                expected[chunk.kind][row, column[chunk.rank]] += expected_us(cost, chunk)
        for beside in (of for of in one.beside if of.kind in us):
            us[beside.kind][row, column[beside.rank]] += beside.us
    known = bool(whole) and all((of > 0).all() for of in expected.values())
    return RankWindow(
        stage_of={rank: plan.role_of[rank].stage for rank in ranks},
        iterations=tuple(one.committed.iteration for one in whole),
        measured_us=np.array([one.committed.measured_us for one in whole]),
        us=us,
        expected_us=expected if known else {},
    )


def compare(window: RankWindow, options: DetectorOptions, *, uneven: bool = False) -> Comparison:
    """Who is slow, who waits for data, who is given more: the costliest first, one verdict per rank and cause. `uneven`: the
    ranks are given different numbers of samples on purpose."""
    computing, sight = _computing(window, options, uneven=uneven)
    idling = [one for kind in IDLE for one in idle(window, kind, options)]
    found = [*computing, *idling, *([] if uneven else _given_more(window, options))]
    found.sort(key=lambda one: -float(one.evidence["share_of_time"]))
    return Comparison(tuple(msgspec.structs.replace(one, verdict=number) for number, one in enumerate(found, start=1)), sight)


def at_a_glance(window: RankWindow, options: DetectorOptions) -> set[int]:
    """Ranks that over the last iterations took as much longer than the others as would be named, or waited for their data."""
    found, levels = set[int](), {n: level_of_few(options, n) for n in LOOKED_AT}
    for kind in (*CHUNKS, *BESIDE):
        for rank in window.ranks:
            if (over := excess_over_others(window, kind, rank)) is not None:
                found |= {rank for n in LOOKED_AT if n <= len(over) and median_of(np.sort(over[-n:])) >= levels[n]}
    return found | {
        party.rank for one in idle(window, "data_wait", options) for party in one.culprits if party.rank is not None
    }


def took_longer(window: RankWindow, kind: str, rank: int) -> float | None:
    """Median log of what a rank took of this kind over what the others did; None = nobody is beside it."""
    over = excess_over_others(window, kind, rank) if kind in window.us else None
    return None if over is None or not len(over) else float(np.median(over))


def excess_over_others(window: RankWindow, kind: str, rank: int) -> Floats | None:
    """[iteration]: log of its time, over what its lengths let expect, over that of the others."""
    us = window.us[kind] / window.expected_us[kind] if kind in window.expected_us else window.us[kind]
    both = window.over_others(np.log(np.maximum(us, LEAST_US)), rank)
    return None if both is None else both[0] - both[1]


def _computing(window: RankWindow, options: DetectorOptions, *, uneven: bool) -> tuple[list[Verdict], Sight]:
    if len(window.ranks) < 2:
        return [], Sight(scope="device", smallest_slowdown=None, why="one rank has nobody beside it")
    weighed = bool(window.expected_us)
    chunks = np.stack([window.us[kind] / window.expected_us[kind] if weighed else window.us[kind] for kind in CHUNKS])
    roles = window.stage_of
    if len({*roles.values()}) == len(roles):
        return [], Sight(scope="device", smallest_slowdown=None, why="each rank does other work than the others")
    times = RankTimes(CHUNKS, window.iterations, roles, chunks)
    found = judge_workers(times, options, equal_work=True, lengths_known=weighed, least=FEW)
    apart = _given_others(window)
    verdicts, sight = [one for one in found.verdicts if one.culprits[0].rank not in apart], found.sight
    if apart:
        why = f"rank {apart[0]} is always given other lengths than the others: it is slow or these cost what they do"
        sight = Sight(scope="device", smallest_slowdown=None, why=why)
    for kind in (kind for kind in BESIDE if _may_cost(window, kind)):
        times = RankTimes((kind,), window.iterations, roles, window.us[kind][None])
        verdicts += judge_workers(times, options, equal_work=True, lengths_known=True, least=FEW).verdicts
    kept: dict[int, Verdict] = {}
    for verdict in verdicts:
        share = share_of(window, verdict, uneven=uneven)
        rank = verdict.culprits[0].rank
        if rank is None or share < LEAST_SHARE or verdict.until_iteration is not None:
            continue
        if not weighed and not verdict.speed.keys() - set(CHUNKS) and len(verdict.speed) == len(CHUNKS):
            why = f"rank {rank} takes longer in all its work, and no lengths are known: it is slow or has more to do"
            sight = Sight(scope="device", smallest_slowdown=None, why=why)
            continue
        if rank not in kept or share > float(kept[rank].evidence["share_of_time"]):
            evidence = {**verdict.evidence, "share_of_time": round(share, 4)}
            kept[rank] = msgspec.structs.replace(verdict, evidence=evidence)
    return [*kept.values()], sight


def _given_others(window: RankWindow) -> list[int]:
    """The ranks that are given lengths which none of their stage is given as well, where all of these are so few that the
    predictor makes of a rank's slowness what its lengths cost."""
    if "F" not in window.expected_us:
        return []
    of = {rank: {*column.round(3).tolist()} for rank, column in zip(window.ranks, window.expected_us["F"].T, strict=True)}
    found = []
    for rank, stage in window.stage_of.items():
        others = set().union(*(of[one] for one, its in window.stage_of.items() if its == stage and one != rank))
        if others and not of[rank] & others and len(of[rank] | others) <= FEW_LENGTHS:
            found.append(rank)
    return found


def _may_cost(window: RankWindow, kind: str) -> bool:
    """Whether some rank's excess in this kind is in any iteration what it must be in the median one to be named."""
    over = (window.over_others(window.us[kind], rank) for rank in window.ranks)
    return any((both[0] - both[1]).max(initial=0.0) >= LEAST_SHARE * window.iteration_us for both in over if both is not None)


def share_of(window: RankWindow, verdict: Verdict, *, uneven: bool) -> float:
    """What the culprit's excess over the others, in the kinds that the verdict names, is of an iteration; over what they would
    take for its own work, where that is not the same."""
    column = window.ranks.index(verdict.culprits[0].rank or 0)
    first = next((row for row, number in enumerate(window.iterations) if number >= verdict.since_iteration), 0)
    us = np.sum([window.us[kind][first:] for kind in verdict.speed], axis=0)
    scale = np.ones_like(us)
    if uneven and window.expected_us:
        expected = np.sum([window.expected_us[kind][first:] for kind in verdict.speed if kind in CHUNKS], axis=0)
        scale = expected[:, [column]] / expected if np.ndim(expected) else scale
    both = window.over_others(us * scale, window.ranks[column])
    return 0.0 if both is None else float(np.median(both[0] - both[1])) / window.iteration_us


def idle(window: RankWindow, kind: str, options: DetectorOptions) -> list[Verdict]:
    """Who waits for input, or collects garbage (`kind`, of `IDLE`), for a larger part of the time than the one that does least;
    everybody, when all do."""
    cause, spikes, words = IDLE[kind]
    waits = window.us[kind]
    kept = np.argsort(waits, axis=0)[: max(round((1 - spikes) * len(waits)), 1)]
    of_time = np.take_along_axis(waits, kept, axis=0).sum(axis=0) / window.measured_us[kept].sum(axis=0)
    shares = dict(zip(window.ranks, of_time.tolist(), strict=True))
    least, needed = min(shares.values()), LEAST_SHARE * max(options.least_iterations / len(waits), 1.0) ** 0.5
    late = [rank for rank, share in shares.items() if share - least >= needed]
    if late:
        cost = max(shares.values()) - least
    elif least >= needed:
        late, cost = [*window.ranks], least
    else:
        return []
    who = f"rank {late[0]}" if len(late) == 1 else "every rank" if len(late) == len(window.ranks) else f"ranks {late}"
    sentence = f"{words} on {who} costs {100 * cost:.1f} % of the time"
    return [_verdict(window, cause, late, sentence, share=cost, options=options)]


def _given_more(window: RankWindow, options: DetectorOptions) -> list[Verdict]:
    if not window.expected_us or len(window.ranks) < 2:
        return []
    expected = np.sum([*window.expected_us.values()], axis=0)
    found = []
    for rank in window.ranks:
        if (both := window.over_others(expected, rank)) is None:
            continue
        more, ratio = float(np.median(both[0] - both[1])), float(np.median(both[0] / both[1]))
        always = float((both[0] > both[1]).mean())
        if more >= LEAST_SHARE * window.iteration_us and always >= 1 - SPIKES:
            share = min(more / window.iteration_us, 1.0)  # by the predictor, which may be wrong
            sentence = (
                f"rank {rank} is given {ratio:.2f} times the work of the others by its sequence lengths, which costs "
                f"{100 * share:.1f} % of the time"
            )
            found.append(_verdict(window, "long_sequences", [], sentence, share=share, options=options, ranks=[rank]))
    return found


def _verdict(
    window: RankWindow,
    cause: Cause,
    culprits: Sequence[int],
    sentence: str,
    *,
    share: float,
    options: DetectorOptions,
    **evidence: object,
) -> Verdict:
    return Verdict(
        verdict=0,
        cause=cause,
        culprits=devices(culprits),
        victims=devices(set(window.ranks) - set(culprits)) if culprits else (),
        since_iteration=window.iterations[0],
        at_iteration=window.iterations[-1],
        confidence=1.0,
        sentence=sentence,
        evidence={"share_of_time": round(share, 4), **evidence},
        config=options.digest,
    )
