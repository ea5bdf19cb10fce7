"""A whole replica that is slower than the others for many iterations, whatever its micro-batches: the replica or its data.

Where lengths are inferred, the stages of a replica excuse each other: that all of them are slow looks like long documents. What
tells a shift from lengths is that lengths are drawn anew: how much longer than the others' a replica's chunks take in one
iteration says nothing about the next, while a shift stays. So, per replica and iteration, the excess is the log of its mean
chunk time over the median of the other replicas', the least over kinds of work and stages (a single slow device slows one
stage). Its noise `sigma` comes from the differences of successive iterations, which a shift leaves alone. A stretch of
iterations is named when the sum of its excess is more than independent iterations sum to, in all but `FALSE_ALARMS` of healthy
traces, whichever replica and stretch is looked at; a third of that is for all iterations, a third for those from one on to the
end, a third for any others. Each excess counts up to a bound, so that fewer than `least_iterations` never suffice.

What stays cannot be told from data that is always longer there: the verdict accuses the replica or its data, and the two
share the confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import exp, inf, log, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.verdicts import MEDIAN_ERROR
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Party, Verdict

FALSE_ALARMS = 1e-3
MOST_BLOCKS = 256
"""Longer recordings are looked at in so many blocks of iterations: every stretch is tried, and their number grows squared."""
MAD_EFFICIENCY = 0.37
"""A spread from median distances is as uncertain as one of so much less data, normal noise."""
SURE_SIGMAS = 2.0
EXPLANATIONS = 2
NEXT_STEP = (
    "tell the two apart: log document lengths, give the replica another one's data for some iterations (a slow replica stays "
    "slow), or run a probe on its devices"
)


class ReplicaShift(msgspec.Struct, frozen=True):
    """One replica's stretch of iterations (positions, the end excluded); `over`: its sum of excess over what is named."""

    replica: int
    begin: int
    end: int
    over: float


class ReplicaExcess(msgspec.Struct, frozen=True):
    """`of_kind`: kind of work -> [replica, iteration] log of the time ratio, `least` over all kinds and stages. `sigma`
    [replica]: noise of one iteration; `limits`: the score to be named, of all iterations, those to the end, any others."""

    replicas: tuple[int, ...]
    of_kind: dict[str, Array]
    least: Array
    sigma: Array
    limits: tuple[float, float, float]

    def limit(self, begin: Array, end: Array) -> Array:
        """For stretches of iterations."""
        n = self.least.shape[1]
        return np.asarray(np.where(end < n, self.limits[2], np.where(begin > 0, self.limits[1], self.limits[0])))


def judge_replicas(
    section: TraceSection, excess: ReplicaExcess, options: DetectorOptions, first_number: int
) -> tuple[Verdict, ...]:
    """The replicas that were slower, a verdict each."""
    named = [
        shift
        for row in range(len(excess.replicas))
        for shift in _shifts(excess, row, options)
        if _level(excess.least, row, shift) >= options.least_level()
    ]
    return tuple(_verdict(section, excess, shift, first_number + i, options) for i, shift in enumerate(named))


def excess_of(
    section: TraceSection, work_us: Array, slow: Collection[int | None], options: DetectorOptions
) -> ReplicaExcess | None:
    """How much longer each replica's chunks take than the others'; None with one replica, or too few iterations. Where one of
    the ranks `slow`, which are named, executes a stage, its replica is neither judged nor a measure of others by that stage."""
    n = len(section.recording.iterations)
    cells = [(kind, _over_others(section, work_us[members], members, slow)) for (kind, _), members in section.cells.items()]
    replicas = tuple(sorted({replica for _, of in cells for replica in of}))
    if len(replicas) < 2 or n < 2 * options.least_iterations:
        return None

    def over_cells(fold: Callable[..., Array], kinds: Collection[str]) -> Array:
        return np.array([fold([of[one] for kind, of in cells if kind in kinds and one in of], axis=0) for one in replicas])

    kinds = {kind for kind, _ in cells}
    least = over_cells(np.min, kinds)
    n_blocks = min(n, MOST_BLOCKS)
    stretches = len(replicas) * np.array([1, n_blocks, n_blocks * (n_blocks + 1) / 2])
    freedom = max(MAD_EFFICIENCY * (len(replicas) - 1) * (n_blocks - 1), 1.0)
    limits = tuple((-stdtrit(freedom, FALSE_ALARMS / 3 / stretches)).tolist())
    return ReplicaExcess(
        replicas=replicas,
        of_kind={kind: over_cells(np.median, {kind}) for kind in kinds},
        least=least,
        sigma=_noise(least, limits[2] / sqrt(options.least_iterations), options.sigma_floor),
        limits=limits,
    )


def _over_others(
    section: TraceSection, work_us: Array, members: NDArray[np.signedinteger], slow: Collection[int | None]
) -> dict[int, Array]:
    """replica -> [iteration] log of its mean time in a cell over the median of the others'; none where there are no others."""
    operations = section.recording.graph.operations
    named = {operations[i].replica for i in members if operations[i].rank in slow}
    place = np.array([operations[i].replica for i in members])
    replicas = sorted({*place.tolist()} - named)
    if len(replicas) < 2:
        return {}
    means = [work_us[place == replica].mean(axis=0) for replica in replicas]
    logs = np.log(np.maximum(means, 1e-9))
    return {replica: logs[row] - np.median(np.delete(logs, row, axis=0), axis=0) for row, replica in enumerate(replicas)}


def _noise(least: Array, most: float, floor: float) -> Array:
    """[replica] of one iteration, from its differences to the next: of all replicas by their median distance, or of one's own
    by their mean square, where that is more, each counted up to `most` of the former."""
    steps = np.diff(least, axis=1)
    usual = max(1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / sqrt(2), floor)
    bounded = np.diff(np.clip(least, -most * usual, most * usual), axis=1)
    return np.asarray(np.maximum(usual, np.sqrt((bounded**2).mean(axis=1) / 2)))


def smallest_slowdown(excess: ReplicaExcess, options: DetectorOptions) -> float:
    """The least that a replica slow in all iterations is named for, in 97 of 100 traces."""
    error = float(excess.sigma.max()) / sqrt(excess.least.shape[1])
    return exp(max(options.least_level() + SURE_SIGMAS * MEDIAN_ERROR * error, (excess.limits[0] + SURE_SIGMAS) * error))


def _shifts(excess: ReplicaExcess, row: int, options: DetectorOptions) -> list[ReplicaShift]:
    """The stretches in which a replica is slower, the strongest first, then beside it."""
    sigma = excess.sigma[row]
    most = excess.limits[2] * sigma / sqrt(options.least_iterations)
    series = _blocks(np.clip(excess.least[row], -most, most)[None, :])[0]
    n = excess.least.shape[1]
    edges = np.linspace(0, n, len(series) + 1).round().astype(int)
    sizes = np.diff(edges)
    sums = np.concatenate(([0.0], np.cumsum(series * sizes)))

    def strongest(first: int, last: int) -> list[ReplicaShift]:
        if last <= first:
            return []
        begin, end = (first + side for side in np.triu_indices(last - first + 1, k=1))
        score = (sums[end] - sums[begin]) / (sigma * np.sqrt(edges[end] - edges[begin]))
        over = score / excess.limit(edges[begin], edges[end])
        free = (begin > 0).astype(int) + (end < len(series))
        fit = np.where(over >= 1, score**2 - 2 * free * log(len(series)), -inf)  # an edge within must pay for itself (BIC)
        at = int(np.argmax(fit))
        if over[at] < 1:
            return []
        found = ReplicaShift(excess.replicas[row], int(edges[begin[at]]), int(edges[end[at]]), float(over[at]))
        return [found, *strongest(first, int(begin[at])), *strongest(int(end[at]), last)]

    return strongest(0, len(series))


def _blocks(series: Array) -> Array:
    """[row, iteration] as means of at most `MOST_BLOCKS` stretches of iterations."""
    n = series.shape[1]
    if n <= MOST_BLOCKS:
        return series
    edges = np.linspace(0, n, MOST_BLOCKS + 1).round().astype(int)
    return np.asarray(np.add.reduceat(series, edges[:-1], axis=1) / np.diff(edges))


def _level(excess: Array, row: int, shift: ReplicaShift) -> float:
    return float(np.median(excess[row, shift.begin : shift.end]))


def _verdict(
    section: TraceSection, excess: ReplicaExcess, shift: ReplicaShift, number: int, options: DetectorOptions
) -> Verdict:
    row, iterations = excess.replicas.index(shift.replica), section.recording.iterations
    since, until = iterations[shift.begin], iterations[shift.end] if shift.end < len(iterations) else None
    operations = section.recording.graph.operations
    ranks = sorted({operation.rank for operation in operations if operation.replica == shift.replica})
    ratio = {kind: exp(_level(of, row, shift)) for kind, of in sorted(excess.of_kind.items())}
    times = exp(_level(excess.least, row, shift))
    who = f"replica {shift.replica} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
    when = f"since iteration {since}" if until is None else f"from iteration {since} until {until}"
    return Verdict(
        verdict=number,
        cause="unknown",
        culprits=(Party(kind="replica", replica=shift.replica),),
        victims=tuple(Party(kind="replica", replica=other) for other in excess.replicas if other != shift.replica),
        speed={kind: round(1 / value, 4) for kind, value in ratio.items()},
        since_iteration=since,
        until_iteration=until,
        at_iteration=iterations[shift.end - 1],
        confidence=round(1 / EXPLANATIONS, 3),
        sentence=(
            f"{who} or its data: all its stages take {times:.2f} times as long as the other replicas' {when}, whatever the "
            "micro-batch; which of the two, the log does not show"
        ),
        evidence={
            "time_ratio": {kind: round(value, 4) for kind, value in ratio.items()},
            "sigma": round(float(excess.sigma[row]), 4),
            "over_limit": round(shift.over, 2),
            "n": shift.end - shift.begin,
            "ranks": ranks,
            "next_step": NEXT_STEP,
        },
        config=options.digest,
    )
