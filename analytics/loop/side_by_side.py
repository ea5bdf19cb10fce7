"""Ranks that should take the same, side by side over their last iterations: what a detector of changes cannot see.

For a training that is not ours: there a rank may be slow from its first iteration on, in its loader, its optimizer or whatever
the loop does between. Three readings of one window of iterations (docs/guide/watch.md):

1. a rank's forward and backward time over what its lengths let expect, its optimizer's and its other time, each against the
   other ranks' of the same iteration (detector/workers.py); it is named when it costs `LEAST_SHARE` of the iteration as well;
2. waiting for data: what a rank waits beyond the one that waits least;
3. lengths: a rank that is always given more work than the others is slow by no fault of its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.verdicts import devices
from unskew.analytics.detector.workers import RankTimes, judge_workers
from unskew.analytics.predictor.fit import expected_us
from unskew.collector.events import Cause, Verdict

LEAST_SHARE = 0.05
"""What costs less of an iteration is not named."""
SPIKES = 0.1
"""This part of the iterations, those with the longest waits for data, is left out."""
CHUNKS, BESIDE = ("F", "B"), ("optimizer", "other")


class Comparison(msgspec.Struct, frozen=True):
    """Verdicts, numbered from 1, and what (1) would have seen."""

    verdicts: tuple[Verdict, ...]
    sight: Sight


class RankWindow(msgspec.Struct, frozen=True):
    """`us` kind -> [iteration, rank], own times; `expected_us` the same for the chunks whose lengths are known, all of them or
    none."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    iteration_us: float
    us: Mapping[str, Floats]
    expected_us: Mapping[str, Floats]


def window_of(seen: Sequence[IterationTelemetry], ranks: tuple[int, ...], cost: CostModel | None) -> RankWindow:
    """The complete iterations of `seen`."""
    whole = [one for one in seen if one.committed.log_complete]
    shape = (len(whole), len(ranks))
    column = {rank: index for index, rank in enumerate(ranks)}
    us = {kind: np.zeros(shape) for kind in (*CHUNKS, *BESIDE, "data_wait")}
    expected = {kind: np.zeros(shape) for kind in CHUNKS}
    for row, one in enumerate(whole):
        for chunk in one.committed.chunks:
            us[chunk.kind][row, column[chunk.rank]] += chunk.us
            if cost is not None and chunk.work.tokens:
                expected[chunk.kind][row, column[chunk.rank]] += expected_us(cost, chunk)
        for beside in one.beside:
            us[beside.kind][row, column[beside.rank]] += beside.us
    known = bool(whole) and all((of > 0).all() for of in expected.values())
    return RankWindow(
        ranks=ranks,
        iterations=tuple(one.committed.iteration for one in whole),
        iteration_us=float(np.median([one.committed.measured_us for one in whole])) if whole else 0.0,
        us=us,
        expected_us=expected if known else {},
    )


def compare(window: RankWindow, options: DetectorOptions) -> Comparison:
    """Who is slow, who waits for data, who is given more: the costliest first, one verdict per rank and cause."""
    computing, sight = _computing(window, options)
    found = [*computing, *waiting_for_data(window, options), *_given_more(window, options)]
    found.sort(key=lambda one: -float(one.evidence["share_of_time"]))
    return Comparison(tuple(msgspec.structs.replace(one, verdict=number) for number, one in enumerate(found, start=1)), sight)


def _computing(window: RankWindow, options: DetectorOptions) -> tuple[list[Verdict], Sight]:
    if len(window.ranks) < 2:
        return [], Sight(scope="device", smallest_slowdown=None, why="one rank has nobody beside it")
    weighed = bool(window.expected_us)
    chunks = np.stack([window.us[kind] / window.expected_us[kind] if weighed else window.us[kind] for kind in CHUNKS])
    roles = dict.fromkeys(window.ranks, 0)
    found = judge_workers(RankTimes(CHUNKS, window.iterations, roles, chunks), options, equal_work=True, lengths_known=weighed)
    verdicts, sight = [*found.verdicts], found.sight
    for kind in BESIDE:
        times = RankTimes((kind,), window.iterations, roles, window.us[kind][None])
        verdicts += judge_workers(times, options, equal_work=True, lengths_known=True).verdicts
    kept: dict[int, Verdict] = {}
    for verdict in verdicts:
        share = _share(window, verdict)
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


def _share(window: RankWindow, verdict: Verdict) -> float:
    """What the culprit's excess over the others, in the kinds that the verdict names, is of an iteration."""
    column = window.ranks.index(verdict.culprits[0].rank or 0)
    first = next((row for row, number in enumerate(window.iterations) if number >= verdict.since_iteration), 0)
    us = np.sum([window.us[kind][first:] for kind in verdict.speed], axis=0)
    excess = us[:, column] - np.median(np.delete(us, column, axis=1), axis=1)
    return float(np.median(excess)) / window.iteration_us


def waiting_for_data(window: RankWindow, options: DetectorOptions) -> list[Verdict]:
    """Who waits for input longer than the one that waits least; everybody, when all do."""
    waits = np.sort(window.us["data_wait"], axis=0)
    kept = waits[: max(round((1 - SPIKES) * len(waits)), 1)].mean(axis=0)
    shares = {rank: float(us) / window.iteration_us for rank, us in zip(window.ranks, kept, strict=True)}
    least = min(shares.values())
    late = [rank for rank, share in shares.items() if share - least >= LEAST_SHARE]
    if late:
        cost = max(shares.values()) - least
    elif least >= LEAST_SHARE:
        late, cost = [*window.ranks], least
    else:
        return []
    who = f"rank {late[0]}" if len(late) == 1 else "every rank" if len(late) == len(window.ranks) else f"ranks {late}"
    sentence = f"waiting for input on {who} costs {100 * cost:.1f} % of the time"
    return [_verdict(window, "input_bound", late, sentence, share=cost, options=options)]


def _given_more(window: RankWindow, options: DetectorOptions) -> list[Verdict]:
    if not window.expected_us or len(window.ranks) < 2:
        return []
    expected = np.sum([*window.expected_us.values()], axis=0)
    found = []
    for column, rank in enumerate(window.ranks):
        others = np.median(np.delete(expected, column, axis=1), axis=1)
        more, ratio = float(np.median(expected[:, column] - others)), float(np.median(expected[:, column] / others))
        always = float((expected[:, column] > others).mean())
        if more >= LEAST_SHARE * window.iteration_us and always >= 1 - SPIKES:
            share = more / window.iteration_us
            sentence = (
                f"rank {rank} is given {ratio:.2f} times the work of the others by its sequence lengths, which costs "
                f"{100 * share:.1f} % of the time: no device is at fault"
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
