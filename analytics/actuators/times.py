"""How long a step of a data-parallel training takes, by who is given which samples: what every actuator predicts by.

``step = max over ranks (beside + slowness * cost of its samples) + end``: the cost by the fitted model (core/cost.py) on a
healthy device, slowness and beside (optimizer, loader, the rest) as they were measured of each rank, the end as what remained.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.division import Division, grouped, split
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.predictor.fit import expected_us

Batches = Sequence[Sequence[float]]
"""Global batches: the lengths of their samples in the loader's order, rank by rank."""
LEAST_SPREAD = 0.1
"""Between the ranks' batches, of their tokens."""


class JobTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`micro_batch_us`, `token_us`, `token2_us`: forward and backward of a rank's part of a batch on a healthy device, less
    what it costs per token; `slowness`, `beside_us` per rank (1.0 and 0.0 for one that has left); a step has `micro_batches`
    of them."""

    micro_batch_us: float
    token_us: float
    token2_us: float
    slowness: tuple[float, ...]
    beside_us: tuple[float, ...]
    end_us: float
    micro_batches: int = 1
    padded: bool = False

    def steps_us(self, division: Division, batches: Batches) -> list[float]:
        """What each step takes where the global batches are divided so."""
        mine = msgspec.structs.replace(
            division, token_us=self.token_us, token2_us=self.token2_us, slowness=self.slowness, padded=self.padded
        )
        rows: list[list[float]] = []
        for first in range(0, len(batches), max(division.window, 1)):
            window = batches[first : first + max(division.window, 1)]
            for group in grouped(window, mine, ""):
                lengths = [window[batch][place] for batch, place in group]
                rows.append([self._part_us(mine, [lengths[place] for place in of]) for of in split(lengths, mine)])
        each = self.micro_batches
        whole = range(0, max(len(rows) - each, 0) + 1, each)
        return [self._step_us(rows[first : first + each]) for first in whole]

    def mean_us(self, division: Division, batches: Batches) -> float:
        """The mean of `steps_us`."""
        return fmean(self.steps_us(division, batches))

    def healthy(self, rank: int) -> JobTimes:
        """As if `rank` were like the others."""
        slowness, beside = [*self.slowness], [*self.beside_us]
        slowness[rank] = median(one for other, one in enumerate(slowness) if other != rank)
        beside[rank] = median(one for other, one in enumerate(beside) if other != rank)
        return msgspec.structs.replace(self, slowness=tuple(slowness), beside_us=tuple(beside))

    def _part_us(self, division: Division, lengths: Sequence[float]) -> float:
        return self.micro_batch_us + division.batch_us(lengths) if lengths else 0.0

    def _step_us(self, rows: Sequence[Sequence[float]]) -> float:
        own = (slow * sum(of) + beside * (sum(of) > 0) for slow, beside, of in zip(self.slowness, self.beside_us,
               zip(*rows, strict=True), strict=True))  # fmt: skip
        return float(max(own)) + self.end_us


def times_of(seen: Sequence[IterationTelemetry], cost: CostModel, ranks: int, *, padded: bool = False) -> JobTimes:
    """By what the last whole iterations measured; at least one is needed."""
    slowness, beside = [1.0] * ranks, [0.0] * ranks
    present = sorted({chunk.rank for one in seen for chunk in one.committed.chunks})
    for rank in present:
        ratios, others = [], []
        for one in seen:
            mine = [chunk for chunk in one.committed.chunks if chunk.rank == rank]
            expected = sum(expected_us(cost, chunk) for chunk in mine)
            if expected > 0:
                ratios.append(sum(chunk.us for chunk in mine) / expected)
            others.append(sum(done.us for done in one.beside if done.rank == rank))
        slowness[rank], beside[rank] = median(ratios or [1.0]), median(others)
    ends = [took_us(one) - max(_busy_us(one, rank) for rank in present) for one in seen]
    chunks = [cost.joined.chunks[kind] for kind in ("F", "B") if kind in cost.joined.chunks]
    counts = [sum(chunk.kind == "F" for chunk in one.committed.chunks) for one in seen]
    return JobTimes(
        micro_batch_us=sum(one.own_us + one.layer_us for one in chunks),
        token_us=sum(one.token_us + one.head_us_per_token for one in chunks),
        token2_us=sum(one.token2_us for one in chunks),
        slowness=tuple(slowness),
        beside_us=tuple(beside),
        end_us=max(median(ends), 0.0),
        micro_batches=max(round(median(counts) / len(present)), 1),
        padded=padded,
    )


class StepLevel(msgspec.Struct, frozen=True):
    """A predictor as it was when a plan came into force, and by how much iterations before that took longer, in the mean: steps
    are held up now and then under either plan. All without what was waited for want of cores (`took_us`)."""

    cost: CostModel
    longer_us: float

    def step_us(self, plan: Plan, one: IterationTelemetry) -> float:
        """Of an iteration, by what its ranks were given."""
        return predict_iteration(plan, one.committed.works, self.cost, {}).iteration_us


def level_of(cost: CostModel, plan: Plan, seen: Sequence[IterationTelemetry]) -> StepLevel:
    """By the iterations that were `seen` under `plan`."""
    level = StepLevel(cost, 0.0)
    longer = [took_us(one) - level.step_us(plan, one) for one in seen if one.committed.log_complete]
    return StepLevel(cost, fmean(longer)) if longer else level


def took_us(one: IterationTelemetry) -> float:
    """Of an iteration, less what it took longer for want of cores."""
    return max(one.committed.measured_us - one.coreless_us, 0.0)


def _busy_us(one: IterationTelemetry, rank: int) -> float:
    chunks = sum(chunk.us for chunk in one.committed.chunks if chunk.rank == rank)
    return chunks + sum(done.us for done in one.beside if done.rank == rank)


def like_seen(seen: Sequence[IterationTelemetry], division: Division) -> list[list[float]]:
    """Global batches as the ranks were given them, where the lengths of single samples are not known: all of a rank's are taken
    for alike."""
    found = []
    for one in seen:
        by_number: dict[int, list[float]] = {}
        present = [rank for rank, count in enumerate(division.samples) if count]
        for number, work in enumerate(one.committed.works):
            rank = present[number % len(present)]
            count = division.samples[rank]
            by_number.setdefault(number // len(present), []).extend([work.tokens / count] * count)
        found += [by_number[number] for number in sorted(by_number)]
    return found


def by_lengths(times: JobTimes, seen: Sequence[IterationTelemetry], drawn: Sequence[Batches], division: Division) -> JobTimes:
    """With the cost of a sample by its own length, as the loader has it (`drawn`: the global batches of each of `seen`), padded
    or not: whichever explains better what the ranks took. Non-negative least squares of relative errors."""
    rows: list[tuple[tuple[float, ...], tuple[float, ...], float]] = []
    for one, batches in zip(seen, drawn, strict=True):
        for rank in {chunk.rank for chunk in one.committed.chunks}:
            took = sum(chunk.us for chunk in one.committed.chunks if chunk.rank == rank) / times.slowness[rank]
            parts = [[batch[place] for place in split(batch, division)[rank]] for batch in batches]
            rows.append((_terms(parts, padded=False), _terms(parts, padded=True), took))
    fits = {}
    for padded in (False, True):
        terms, us = np.array([row[padded] for row in rows]), np.array([row[2] for row in rows])
        if np.ptp(terms[:, 1]) < LEAST_SPREAD * terms[:, 1].mean():
            terms[:, ::2] = 0.0  # all alike: what is not per token cannot be told apart
        fits[padded] = _fitted(terms, us)
    padded = fits[True][1] < fits[False][1]
    micro_batch_us, token_us, token2_us = map(float, fits[padded][0])
    return msgspec.structs.replace(times, micro_batch_us=micro_batch_us, token_us=token_us, token2_us=token2_us, padded=padded)


def _terms(parts: Sequence[Sequence[float]], *, padded: bool) -> tuple[float, float, float]:
    """Micro-batches, tokens, squared lengths."""
    lengths = [length for of in parts for length in ([max(of)] * len(of) if padded else of)]
    return float(len(parts)), sum(lengths), sum(length * length for length in lengths)


def _fitted(terms: NDArray[np.float64], took: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    from scipy.optimize import nnls  # noqa: PLC0415 - 0.2 s that a diagnosis saves

    scale = np.maximum(terms.max(axis=0), 1e-9)
    found, error = nnls(terms / scale / took[:, None], np.ones(len(took)))
    return found / scale, float(error)
