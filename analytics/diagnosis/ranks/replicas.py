"""A whole replica that is slower than the others for many iterations, whatever its micro-batches: the replica or its data.

Where lengths are inferred, the stages of a replica excuse each other: that all of them are slow looks like long documents.
What tells a shift from lengths is that lengths are drawn anew: how much longer than the others' a replica's chunks take in one
iteration says nothing about the next, while a shift stays. So, per replica and iteration, the excess is the log of its mean
chunk time over the median of the other replicas', the least over kinds of work and stages (a single slow device slows one
stage); where lengths are logged, of the time over what they let expect. Its noise `sigma` comes from the differences of
successive iterations, which a shift leaves alone. Stretches of iterations in which it is higher are named by the rule for
ranks (detector/series/stretches.py).

What stays cannot be told from data that is always longer there: the verdict accuses the replica or its data, and the two
share the confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import exp, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.series.stretches import Stretch, StretchTest, stretches_of
from unskew.analytics.detector.stages import NEXT_STEP as WITH_LENGTHS
from unskew.analytics.detector.verdicts import MEDIAN_ERROR, UNDECIDED, replica_words
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Party, Verdict
from unskew.collector.outcome_words import MOST_STATED

SURE_SIGMAS = 2.0
NEXT_STEP = (
    "tell the two apart: log document lengths, give the replica another one's data for some iterations (a slow replica stays "
    "slow), or measure its devices by themselves"
)


class ReplicaExcess(msgspec.Struct, frozen=True):
    """`of_kind`: kind of work -> [replica, iteration] log of the time ratio, `least` over all kinds and stages. `sigma`
    [replica]: noise of one iteration."""

    replicas: tuple[int, ...]
    of_kind: dict[str, Array]
    least: Array
    sigma: Array
    test: StretchTest


def judge_replicas(
    section: TraceSection,
    excess: ReplicaExcess,
    options: DetectorOptions,
    first_number: int,
    slow: Collection[int | None] = (),
) -> tuple[Verdict, ...]:
    """The replicas that were slower, a verdict each, of which those are victims that no verdict names, nor one of their ranks
    (those in `slow`)."""
    shifts = [
        (row, shift)
        for row, sigma in enumerate(excess.sigma)
        for shift in stretches_of(excess.least[[row]], np.array([sigma]), excess.test).found
        if _level(excess.least, row, shift) >= options.least_level()
    ]
    operations = section.recording.graph.operations
    at_fault = {excess.replicas[row] for row, _ in shifts} | {one.replica for one in operations if one.rank in slow}
    victims = tuple(Party(kind="replica", replica=one) for one in excess.replicas if one not in at_fault)
    named = [_verdict(section, excess, row, shift, options) for row, shift in shifts]
    return tuple(
        msgspec.structs.replace(one, verdict=number, victims=victims) for number, one in enumerate(named, start=first_number)
    )


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
    test = StretchTest.of(n, len(replicas), least=options.least_iterations, against_rest=False)
    return ReplicaExcess(
        replicas=replicas,
        of_kind={kind: over_cells(np.median, {kind}) for kind in kinds},
        least=least,
        sigma=_noise(least, test.limits[2] / sqrt(options.least_iterations), options.sigma_floor),
        test=test,
    )


def _over_others(
    section: TraceSection, work_us: Array, members: NDArray[np.signedinteger], slow: Collection[int | None]
) -> dict[int, Array]:
    """replica -> [iteration] log of its mean time in a cell, over its lengths where they are known, over the median of the
    others'; none where there are no others."""
    operations = section.recording.graph.operations
    named = {operations[i].replica for i in members if operations[i].rank in slow}
    place = np.array([operations[i].replica for i in members])
    replicas = sorted({*place.tolist()} - named)
    if len(replicas) < 2:
        return {}
    expected_us = section.expected_us[members] if section.lengths_logged else np.ones_like(work_us)
    means = [work_us[place == one].sum(axis=0) / expected_us[place == one].sum(axis=0) for one in replicas]
    logs = np.log(np.maximum(means, 1e-9))
    return {replica: logs[row] - np.median(np.delete(logs, row, axis=0), axis=0) for row, replica in enumerate(replicas)}


def _noise(least: Array, most: float, floor: float) -> Array:
    """[replica] of one iteration, from its differences to the next: of all replicas by their median distance, or of one's own
    by their mean square, where that is more, each counted up to `most` of the former."""
    steps = np.diff(least, axis=1)
    usual = max(1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / sqrt(2), floor)
    bounded = np.diff(np.clip(least, -most * usual, most * usual), axis=1)
    return np.asarray(np.maximum(usual, np.sqrt((bounded**2).mean(axis=1) / 2)))


def smallest_slowdown(excess: ReplicaExcess, options: DetectorOptions) -> float | None:
    """The least that a replica slow in all iterations is named for, in 97 of 100 traces; None = too much to be stated."""
    error = float(excess.sigma.max()) / sqrt(excess.least.shape[1])
    level = max(options.least_level() + SURE_SIGMAS * MEDIAN_ERROR * error, (excess.test.limits[0] + SURE_SIGMAS) * error)
    return smallest if (smallest := exp(level)) <= MOST_STATED else None


def _level(excess: Array, row: int, shift: Stretch) -> float:
    return float(np.median(excess[row, shift.begin : shift.end]))


def _verdict(section: TraceSection, excess: ReplicaExcess, row: int, shift: Stretch, options: DetectorOptions) -> Verdict:
    replica, iterations = excess.replicas[row], section.recording.iterations
    since, until = iterations[shift.begin], iterations[shift.end] if shift.end < len(iterations) else None
    operations = section.recording.graph.operations
    ranks = sorted({operation.rank for operation in operations if operation.replica == replica})
    ratio = {kind: exp(_level(of, row, shift)) for kind, of in sorted(excess.of_kind.items())}
    times = exp(_level(excess.least, row, shift))
    whatever = "over what their lengths let expect" if section.lengths_logged else "whatever the micro-batch"
    return Verdict(
        verdict=0,
        cause="unknown",
        culprits=(Party(kind="replica", replica=replica),),
        speed={kind: round(1 / value, 4) for kind, value in ratio.items()},
        since_iteration=since,
        until_iteration=until,
        at_iteration=iterations[shift.end - 1],
        confidence=UNDECIDED,
        sentence=(
            f"{replica_words(replica, ranks)} or its data, and the log does not show which: {whatever}, all its stages take "
            f"{times_as_long(times)} as the other replicas' since iteration {since}"
        ),
        evidence={
            "time_ratio": {kind: round(value, 4) for kind, value in ratio.items()},
            "sigma": round(float(excess.sigma[row]), 4),
            "over_limit": round(shift.over, 2),
            "n": shift.end - shift.begin,
            "ranks": ranks,
            "next_step": WITH_LENGTHS if section.lengths_logged else NEXT_STEP,
        },
        config=options.digest,
    )
