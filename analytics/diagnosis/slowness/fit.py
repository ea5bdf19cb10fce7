"""What each candidate, and any set of them, explains of the logs: generalised least squares, levels never below zero.

The logs are taken steady: no iteration stands out by itself, rows know their share of the workload, and there is a noise of
ranks and of workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.special import chdtri

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.series.noise import noise_of
from unskew.analytics.diagnosis.slowness.places import Rows, SlowPlace, SlowStretch
from unskew.analytics.pipeline.dag import Array

SPIKE = 3.0
"""Sigmas that one iteration may differ from those around it; four of them are needed to be more than a spike."""
SHARES_DIFFER = 0.3
"""By so much do shares usually differ from 1."""


class SteadyLogs(msgspec.Struct, frozen=True):
    """`logs` [row, replica, iteration] of which no iteration stands out by itself; `share` [row] of the workload, and by how
    much it may be wrong."""

    logs: Array
    share: Array
    share_error: float


class FitNoise(msgspec.Struct, frozen=True):
    """Of one rank, kind of work and iteration, typical and of each [row, replica], and of a replica's workload in it; logs."""

    sigma: float
    own: Array
    workload: float


def steady(logs: Array, options: DetectorOptions) -> SteadyLogs:
    """The share of each row from how rows and workload change from one iteration to the next, which nothing lasting alters."""
    steps = np.diff(logs, axis=2)
    common = np.median(steps, axis=0)
    sigma = max(1.4826 * float(np.median(np.abs(steps - common))) / sqrt(2), options.sigma_floor)
    bounded = common + np.clip(steps - common, -SPIKE * sqrt(2) * sigma, SPIKE * sqrt(2) * sigma)
    prior = 2 * (sigma / SHARES_DIFFER) ** 2
    known = float((common**2).sum()) + prior
    share = ((bounded * common).sum(axis=(1, 2)) + prior) / known
    of_workload = share[:, None, None] * _workload(logs, share)
    usual = np.median(logs - of_workload, axis=2, keepdims=True)
    own = logs - of_workload - usual
    beside = options.least_iterations - 1
    around = np.median(sliding_window_view(np.pad(own, ((0, 0), (0, 0), (beside, beside))), 2 * beside + 1, axis=2), axis=3)
    bounded = np.clip(own, around - SPIKE * sigma, around + SPIKE * sigma)
    return SteadyLogs(bounded + usual + of_workload, share, sqrt(2 / known) * sigma)


def _workload(logs: Array, share: Array) -> Array:
    """[replica, iteration]: what most rows show."""
    away = logs - np.median(logs, axis=2, keepdims=True)
    return np.asarray(np.median(away / share[:, None, None], axis=0))


def noise_in(data: SteadyLogs, left: Array, parts: int, options: DetectorOptions) -> FitNoise:
    """By what is `left` [row, replica, iteration], typical of so many parts of the recording: while nothing is known to have
    changed, all ranks count for as restless as most are."""
    workload = _workload(left, data.share)

    def typical(series: Array) -> float:
        found = [noise_of(part.tolist(), options.sigma_floor).sigma for part in np.array_split(series, parts)]
        return float(np.median(found))

    own = np.apply_along_axis(typical, 2, left - data.share[:, None, None] * workload)
    sigma = float(np.median(own))
    of_workload = float(np.median(np.apply_along_axis(typical, 1, workload)))
    return FitNoise(sigma, own if parts == 1 else np.full_like(own, sigma), of_workload)


FALSE_ALARMS = 1e-3
"""Healthy traces in which somebody is named; and how much less likely any other explanation must be."""
SURE_SIGMAS = 2.0
LEAST_PEERS = 3
"""So many ranks of a stage that turn slow together are a costlier stage."""


class _FittedLevels(msgspec.Struct, frozen=True):
    """`levels` [candidate, kind], and by how much twice the log-likelihood is better than without."""

    levels: Array
    explained: float


class SlownessFit:
    """The data, with what all candidates need."""

    def __init__(self, data: SteadyLogs, rows: Rows, edges: Array, noise: FitNoise, options: DetectorOptions) -> None:
        self.edges, self.noise, self.options = edges, noise, options
        self.n_kinds, self.n_stages = max(rows.kind) + 1, max(rows.stage) + 1
        self.n_rows, self.n_replicas, self.n = data.logs.shape
        covariance = noise.workload**2 * np.outer(data.share, data.share) + noise.sigma**2 * np.eye(self.n_rows)
        self.precision = np.linalg.inv(covariance)
        self.logs: Array = data.logs - data.logs.mean(axis=(1, 2), keepdims=True)
        self.weighted = self.precision @ self.logs.reshape(self.n_rows, -1)
        self.cells = self.n_replicas * self.n
        stages, replicas = tuple(range(self.n_stages)), tuple(range(self.n_replicas))
        self.alike = [
            *([SlowPlace((stage,), (replica,)) for replica in replicas] for stage in stages),
            *([[SlowPlace(stages, (replica,)) for replica in replicas]] if self.n_stages > 1 else []),
            *([SlowPlace((stage,), replicas)] for stage in stages if self.n_replicas >= LEAST_PEERS),
        ]
        """Candidates: in each list the same stages of one replica each, or of all."""
        self.candidates = [who for alike in self.alike for who in alike]
        stretches = len(edges) * (len(edges) - 1) / 2
        self.limit = float(chdtri(self.n_kinds, FALSE_ALARMS / (len(self.candidates) * stretches)))
        of_kind = np.equal.outer(rows.kind, range(self.n_kinds))
        self._rows_of = {
            alike[0].stages: (of_kind & np.isin(rows.stage, alike[0].stages)[:, None]).astype(float) for alike in self.alike
        }

        self.restless = [self._restless(alike) for alike in self.alike]
        nothing = _FittedLevels(np.zeros((0, self.n_kinds)), 0.0)
        self._fitted: dict[tuple[tuple[SlowPlace, int, int], ...], _FittedLevels] = {(): nothing}
        self._beside: dict[frozenset[tuple[SlowPlace, int, int]], list[SlowStretch]] = {}

    def rows_of(self, who: SlowPlace) -> Array:
        """[row, kind]: 1 where the candidate has a part in the row."""
        return self._rows_of[who.stages]

    def fitted(self, found: Sequence[SlowStretch]) -> _FittedLevels:
        """Levels of all together, none below zero."""
        known = tuple((one.who, one.begin, one.end) for one in found)
        if known not in self._fitted:
            self._fitted[known] = self._fit(found)
        return self._fitted[known]

    def _fit(self, found: Sequence[SlowStretch]) -> _FittedLevels:
        from scipy.optimize import nnls  # noqa: PLC0415 - 0.2 s that a healthy job saves

        where = self._where(found)
        rows = np.array([self.rows_of(one.who) for one in found])  # [candidate, row, kind]
        size = len(found) * self.n_kinds
        columns = rows.transpose(1, 0, 2).reshape(self.n_rows, size)
        overlap = np.kron(where @ where.T, np.ones((self.n_kinds, self.n_kinds)))
        gram = columns.T @ self.precision @ columns * overlap
        given = np.einsum("irk,ri->ik", rows, self.weighted @ where.T).reshape(size)
        root = np.linalg.cholesky(gram + 1e-9 * (np.trace(gram) / size) * np.eye(size))
        levels, _ = nnls(root.T, np.linalg.solve(root, given))
        explained = 2 * levels @ given - levels @ gram @ levels
        return _FittedLevels(levels.reshape(len(found), self.n_kinds), float(explained))

    def left(self, found: Sequence[SlowStretch]) -> Array:
        """What they leave of the logs."""
        if not found:
            return self.logs
        slow = [self.rows_of(one.who) @ levels for one, levels in zip(found, self.fitted(found).levels, strict=True)]
        return np.asarray(self.logs - (np.transpose(slow) @ self._where(found)).reshape(self.logs.shape))

    def _where(self, found: Sequence[SlowStretch]) -> Array:
        """[candidate, replica and iteration]: 1 where each is slow, less its mean."""
        where = np.zeros((len(found), self.n_replicas, self.n))
        for i, one in enumerate(found):
            where[i, list(one.who.replicas), one.begin : one.end] = 1.0
        where -= where.mean(axis=(1, 2), keepdims=True)
        return where.reshape(len(found), -1)

    def heavier(self, found: Sequence[SlowStretch]) -> Array:
        """[replica]: by how much its workload differs from the others' for good, whatever ranks of it are slow."""
        own = self.logs.copy()
        for one in found:
            if one.who.is_rank:
                own[:, one.who.replicas[0], one.begin : one.end] -= (self.rows_of(one.who) @ np.array(one.levels))[:, None]
        away = np.median(own - np.median(own, axis=1, keepdims=True), axis=(0, 2))
        return np.asarray(np.abs(away))

    def best_beside(self, found: Sequence[SlowStretch], excluded: SlowPlace | None = None) -> SlowStretch | None:
        """The candidate that explains most of what these leave, beyond what it costs; None if none does."""
        known = frozenset((one.who, one.begin, one.end) for one in found)
        if known not in self._beside:
            self._beside[known] = self._best_two_beside(found)
        return next((one for one in self._beside[known] if one.who != excluded), None)

    def _best_two_beside(self, found: Sequence[SlowStretch]) -> list[SlowStretch]:
        """The two candidates that explain most, or fewer; the better one first."""
        weighted = np.tensordot(self.precision, self.left(found), 1)
        begin, end = np.triu_indices(len(self.edges), k=1)
        cost = 2 * log(self.n) * ((begin > 0).astype(float) + (end < len(self.edges) - 1))
        length = self.edges[end] - self.edges[begin]
        best: list[tuple[float, SlowStretch]] = []
        for alike, restless in zip(self.alike, self.restless, strict=True):
            rows, peers = self.rows_of(alike[0]), len(alike[0].replicas)
            sums = np.tensordot(rows.T, weighted, 1)  # [kind, replica, iteration]
            sums = sums if peers < self.n_replicas else sums.sum(axis=1, keepdims=True)
            total = np.concatenate([np.zeros((*sums.shape[:2], 1)), np.cumsum(sums, axis=2)], axis=2)[:, :, self.edges]
            given = total[:, :, end] - total[:, :, begin]  # [kind, candidate, stretch]
            cells = peers * length
            possible = (length >= self.options.least_iterations) & (self.cells - cells >= self.options.least_iterations)
            scale = np.where(possible, cells * (1 - cells / self.cells), 1.0)
            gram = rows.T @ self.precision @ rows
            levels = np.maximum(np.linalg.solve(gram, given.reshape(self.n_kinds, -1)).reshape(given.shape) / scale, 0.0)
            gain = 2 * (levels * given).sum(axis=0) - scale * (levels * np.tensordot(gram, levels, 1)).sum(axis=0)
            enough = levels.max(axis=0) >= self.least
            enough &= gain / restless[:, None] - cost > self.limit
            worth = np.where(possible & enough, gain - cost, -np.inf)
            for one in np.argsort(-worth.max(axis=1), kind="stable")[:2].tolist():
                at = int(worth[one].argmax())
                if worth[one, at] > self.limit:
                    slow = tuple(levels[:, one, at].tolist())
                    first, after = int(self.edges[begin[at]]), int(self.edges[end[at]])
                    stretch = SlowStretch(alike[one], first, after, slow, float(gain[one, at]), self.limit)
                    best.append((float(worth[one, at]), stretch))
        return [stretch for _, stretch in sorted(best, key=lambda one: -one[0])[:2]]

    @property
    def least(self) -> float:
        return self.options.least_level(young=self.n < self.options.own_past)

    def _restless(self, alike: Sequence[SlowPlace]) -> Array:
        """[candidate]: how much more its logs vary than usual, as a ratio of variances."""
        mine = self.noise.own[self.rows_of(alike[0]).any(axis=1)] ** 2
        of_each = [mine[:, list(who.replicas)].mean() for who in alike]
        return np.asarray(np.maximum(np.array(of_each) / self.noise.sigma**2, 1.0))

    def worth(self, found: Sequence[SlowStretch]) -> float:
        """What they explain beyond noise; edges within the recording must pay for themselves (BIC)."""
        edges = [edge for one in found for edge in (one.begin, one.end) if 0 < edge < self.n]
        return self.fitted(found).explained - self.limit * len(found) - 2 * len(edges) * log(self.n)

    def smallest(self, first: int) -> float | None:
        """The log of the slowness, from block `first` to the end, of which any single rank would be named for."""
        begin = int(self.edges[first])
        length = self.n - begin
        if length < self.options.least_iterations:
            return None
        margin, worst = 2 * log(1 / FALSE_ALARMS), 0.0
        # Of replica 0, which others are like: what else could explain a rank is in its replica, another one or all.
        places = {(0,), (min(1, self.n_replicas - 1),), tuple(range(self.n_replicas))}
        alternatives = [other for other in self.candidates if other.replicas in places]
        for stage in range(self.n_stages):
            alike = self.rows_of(who := SlowPlace((stage,), (0,))).sum(axis=1)
            own = length * (1 - length / self.cells) * float(alike @ self.precision @ alike)
            if own <= 1e-9:
                return None
            others = 0.0
            for other in alternatives:
                cells = len(other.replicas) * length
                scale = cells * (1 - cells / self.cells)
                if other == who or scale <= 1e-9:
                    continue
                shared = length * (float(0 in other.replicas) - cells / self.cells)
                crossed = shared * (self.rows_of(other).T @ self.precision @ alike)
                gram = scale * self.rows_of(other).T @ self.precision @ self.rows_of(other)
                levels = np.maximum(np.linalg.solve(gram, crossed), 0.0)
                others = max(others, float(2 * levels @ crossed - levels @ gram @ levels))
            if own - others <= 1e-9 * own:
                return None
            worst = max(
                worst,
                (sqrt(self.limit + 2 * log(self.n) * (begin > 0)) + SURE_SIGMAS) * sqrt(self.restless[stage].max() / own),
                (sqrt(margin) + SURE_SIGMAS) / sqrt(own - others),
            )
        return float(max(worst, self.least + SURE_SIGMAS * self.noise.sigma / sqrt(length)))
