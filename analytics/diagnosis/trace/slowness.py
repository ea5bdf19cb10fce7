"""Which ranks are slow where no lengths are recorded: stages, micro-batches and ranks, estimated together.

Of each rank, kind of work and iteration the log of its median chunk counts, Y [row, replica, iteration]; a row is a kind of
work on a place (a stage, or one of its ranges of layers):

    Y = what the row costs + share x workload of the replica's micro-batches + slowness of the rank + noise

Workload is drawn anew in each iteration, alike on all rows of a replica but for the row's `share` (times grow faster with
length on some rows); slowness is never below zero, of few ranks, and stays for at least some iterations. So with the workload
as a random effect a candidate (a rank or a replica, in a stretch of iterations, with a level per kind of work) is a regressor
of generalised least squares, and the set of candidates is found by orthogonal matching pursuit: the one that explains most is
added, all levels are fitted anew, and each earlier one is exchanged where another explains more. Of replicas see replicas.py;
here they keep their ranks from being blamed.

What this can tell apart is computed, not assumed: what a candidate explains that no other one can. It separates

* a slow rank from long micro-batches, which are long on all stages of their replica;
* a slow rank from a costly stage, which is so in all replicas. With one replica only changes can be seen;
* of two stages and two replicas, a rank from the one diagonally opposite, by the replicas' mean workloads alone: in many
  iterations these are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt

import msgspec
import numpy as np
from scipy.ndimage import median_filter
from scipy.optimize import nnls
from scipy.stats import chi2

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.series_noise import noise_of
from unskew.analytics.pipeline.dag import Array

FALSE_ALARMS = 1e-3
"""Healthy traces in which somebody is named; and how much less likely any other explanation must be."""
MOST_BLOCKS = 96
"""Longer recordings are looked at in so many blocks of iterations: every stretch is tried, and their number grows squared."""
SPIKE = 3.0
"""Sigmas that one iteration may differ from those around it; four of them are needed to be more than a spike."""
SHARES_DIFFER = 0.3
"""By so much do shares usually differ from 1."""
SHORT = 12
"""Iterations in which few ranks change: of so many noise is measured before anything is known to have changed."""
SURE_SIGMAS = 2.0
LEAST_PEERS = 3
"""So many ranks of a stage that turn slow together are a costlier stage."""


class Rows(msgspec.Struct, frozen=True):
    """`kind` and `stage` [row], both as numbers from 0."""

    kind: tuple[int, ...]
    stage: tuple[int, ...]


class SlowPlace(msgspec.Struct, frozen=True):
    """Who may be slow: ranks of these stages in these replicas."""

    stages: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def is_rank(self) -> bool:
        return len(self.stages) == len(self.replicas) == 1

    @property
    def is_replica(self) -> bool:
        return len(self.stages) > 1


class SlowStretch(msgspec.Struct, frozen=True):
    """`who` is slow in the iterations [begin, end), positions. `levels`: kind of work (a number) -> log of the time ratio.
    `gain`: by how much twice the log-likelihood is better with it; from `limit` on it is no noise."""

    who: SlowPlace
    begin: int
    end: int
    levels: tuple[float, ...] = ()
    gain: float = 0.0
    limit: float = 0.0


class Slowness(msgspec.Struct, frozen=True):
    """`named`: ranks that nothing else explains; `ambiguous`: for each of the others the sets of ranks that explain it as well.
    `sigma`: noise of one rank, kind of work and iteration. `smallest`: log of the slowness that would be named in any rank, of
    one there from the first iteration on, and of one that came later; None: none would."""

    named: tuple[SlowStretch, ...] = ()
    ambiguous: tuple[tuple[SlowPlace, SlowPlace], ...] = ()
    sigma: float = 0.0
    smallest: float | None = None
    smallest_change: float | None = None


def slowness_of(logs: Array, rows: Rows, options: DetectorOptions) -> Slowness:
    """From `logs` [row, replica, iteration]."""
    n = logs.shape[2]
    if n < options.least_iterations:
        return Slowness()
    edges = np.linspace(0, n, min(n, MOST_BLOCKS) + 1).round().astype(int)
    data = _despiked(logs, options)
    fit = _Fit(data, rows, edges, _noise(data, data.logs, max(n // SHORT, 1), options), options)
    if found := _best(fit):  # what was taken out is no noise
        fit = _Fit(data, rows, edges, _noise(data, fit.fitted(found).left, 1, options), options)
        found = _best(fit)
    named, ambiguous, worth = [], [], fit.worth(found)
    heavier = fit.heavier(found)
    ranks = {one.who for one in found if one.who.is_rank}
    crowded = fit.n_replicas == 1 < len(ranks) and 2 * len(ranks) > fit.n_stages  # no stage is left to go by
    for one in found:
        others = _pursued(fit, [other for other in found if other.who != one.who], excluded=one.who)
        instead = [other.who for other in others if other.who not in {same.who for same in found}]
        replica = SlowPlace(tuple(range(fit.n_stages)), one.who.replicas)
        by_data = SURE_SIGMAS * data.share_error * heavier[list(one.who.replicas)].max()
        if crowded or worth - fit.worth(others) < 2 * log(1 / FALSE_ALARMS):
            ambiguous.append((one.who, instead[0] if instead else replica))
        elif one.who.is_rank and max(one.levels) < fit.least + by_data:
            ambiguous.append((one.who, replica))
        else:
            named.append(one)
    return Slowness(tuple(named), tuple(ambiguous), fit.noise.sigma, fit.smallest(0), fit.smallest(len(edges) // 2))


class _Data(msgspec.Struct, frozen=True):
    """`logs` [row, replica, iteration] of which no iteration stands out by itself; `share` [row] of the workload, and by how
    much it may be wrong."""

    logs: Array
    share: Array
    share_error: float


class _Noise(msgspec.Struct, frozen=True):
    """Of one rank, kind of work and iteration, typical and of each [row, replica], and of a replica's workload in it; logs."""

    sigma: float
    own: Array
    workload: float


class _FittedLevels(msgspec.Struct, frozen=True):
    """`levels` [candidate, kind], what is left of the logs, and by how much twice the log-likelihood is better than without."""

    levels: Array
    left: Array
    explained: float


class _Fit:
    """The data, with what all candidates need."""

    def __init__(self, data: _Data, rows: Rows, edges: Array, noise: _Noise, options: DetectorOptions) -> None:
        self.rows, self.edges, self.noise, self.options = rows, edges, noise, options
        self.n_kinds, self.n_stages = max(rows.kind) + 1, max(rows.stage) + 1
        self.n_rows, self.n_replicas, self.n = data.logs.shape
        covariance = noise.workload**2 * np.outer(data.share, data.share) + noise.sigma**2 * np.eye(self.n_rows)
        self.precision = np.linalg.inv(covariance)
        self.logs = data.logs - data.logs.mean(axis=(1, 2), keepdims=True)
        self.cells = self.n_replicas * self.n
        stages, replicas = tuple(range(self.n_stages)), tuple(range(self.n_replicas))
        self.candidates = [
            *(SlowPlace((stage,), (replica,)) for stage in stages for replica in replicas),
            *(SlowPlace(stages, (replica,)) for replica in replicas if self.n_stages > 1),
            *(SlowPlace((stage,), replicas) for stage in stages if self.n_replicas >= LEAST_PEERS),
        ]
        stretches = len(edges) * (len(edges) - 1) / 2
        self.limit = float(chi2.isf(FALSE_ALARMS / (len(self.candidates) * stretches), self.n_kinds))

    def rows_of(self, who: SlowPlace) -> Array:
        """[row, kind]: 1 where the candidate has a part in the row."""
        return np.array(
            [
                [float(k == kind and stage in who.stages) for k in range(self.n_kinds)]
                for kind, stage in zip(self.rows.kind, self.rows.stage, strict=True)
            ]
        )

    def fitted(self, found: Sequence[SlowStretch]) -> _FittedLevels:
        """Levels of all together, none below zero."""
        if not found:
            return _FittedLevels(np.zeros((0, self.n_kinds)), self.logs, 0.0)
        where = np.zeros((len(found), self.n_replicas, self.n))
        for i, one in enumerate(found):
            where[i, list(one.who.replicas), one.begin : one.end] = 1.0
        where -= where.mean(axis=(1, 2), keepdims=True)
        rows = np.array([self.rows_of(one.who) for one in found])  # [candidate, row, kind]
        overlap = np.einsum("idt,jdt->ij", where, where)
        gram = np.einsum("irk,rs,jsl,ij->ikjl", rows, self.precision, rows, overlap)
        size = len(found) * self.n_kinds
        gram = gram.reshape(size, size)
        given = np.einsum("irk,rs,idt,sdt->ik", rows, self.precision, where, self.logs).reshape(size)
        root = np.linalg.cholesky(gram + 1e-9 * (np.trace(gram) / size) * np.eye(size))
        levels, _ = nnls(root.T, np.linalg.solve(root, given))
        explained = 2 * levels @ given - levels @ gram @ levels
        levels = levels.reshape(len(found), self.n_kinds)
        left = self.logs - np.einsum("irk,ik,idt->rdt", rows, levels, where)
        return _FittedLevels(levels, left, float(explained))

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
        left = self.fitted(found).left
        weighted = np.einsum("rs,sdt->rdt", self.precision, left)
        best: tuple[float, SlowStretch] | None = None
        begin, end = np.triu_indices(len(self.edges), k=1)
        cost = 2 * log(self.n) * ((begin > 0).astype(float) + (end < len(self.edges) - 1))
        length = self.edges[end] - self.edges[begin]
        long = length >= self.options.least_iterations
        for who in self.candidates:
            if who == excluded:
                continue
            rows = self.rows_of(who)
            sums = np.einsum("rk,rdt->kt", rows, weighted[:, list(who.replicas)])
            total = np.concatenate([np.zeros((self.n_kinds, 1)), np.cumsum(sums, axis=1)], axis=1)[:, self.edges]
            given = total[:, end] - total[:, begin]
            cells = len(who.replicas) * length
            scale = cells * (1 - cells / self.cells)
            possible = long & (self.cells - cells >= self.options.least_iterations)
            if not possible.any():
                continue
            gram = rows.T @ self.precision @ rows
            levels = np.maximum(np.linalg.solve(gram, given) / np.where(possible, scale, 1.0), 0.0)
            gain = 2 * (levels * given).sum(axis=0) - scale * np.einsum("kt,kl,lt->t", levels, gram, levels)
            enough = levels.max(axis=0) >= self.least
            enough &= gain / self.restless(who) - cost > self.limit
            worth = np.where(possible & enough, gain - cost, -np.inf)
            at = int(np.argmax(worth))
            if worth[at] > self.limit and (best is None or worth[at] > best[0]):
                stretch = SlowStretch(
                    who, int(self.edges[begin[at]]), int(self.edges[end[at]]), tuple(levels[:, at]), float(gain[at]), self.limit
                )
                best = float(worth[at]), stretch
        return None if best is None else best[1]

    @property
    def least(self) -> float:
        return self.options.least_level(young=self.n < self.options.own_past)

    def restless(self, who: SlowPlace) -> float:
        """How much more its logs vary than usual, as a ratio of variances."""
        mine = self.noise.own[self.rows_of(who).any(axis=1)][:, list(who.replicas)]
        return float(max(1.0, (mine**2).mean() / self.noise.sigma**2))

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
        ones = np.ones(self.n_kinds)
        of = {who: self.rows_of(who) @ ones for who in self.candidates}
        for who in self.candidates:
            if not who.is_rank:
                continue
            own = length * (1 - length / self.cells) * float(of[who] @ self.precision @ of[who])
            if own <= 1e-9:
                return None
            others = 0.0
            for other in self.candidates:
                cells = len(other.replicas) * length
                scale = cells * (1 - cells / self.cells)
                if other == who or scale <= 1e-9:
                    continue
                shared = length * (float(set(who.replicas) <= set(other.replicas)) - cells / self.cells)
                crossed = shared * (self.rows_of(other).T @ self.precision @ of[who])
                gram = scale * self.rows_of(other).T @ self.precision @ self.rows_of(other)
                levels = np.maximum(np.linalg.solve(gram, crossed), 0.0)
                others = max(others, float(2 * levels @ crossed - levels @ gram @ levels))
            if own - others <= 1e-9 * own:
                return None
            worst = max(
                worst,
                (sqrt(self.limit + 2 * log(self.n) * (begin > 0)) + SURE_SIGMAS) * sqrt(self.restless(who) / own),
                (sqrt(margin) + SURE_SIGMAS) / sqrt(own - others),
            )
        return float(max(worst, self.least + SURE_SIGMAS * self.noise.sigma / sqrt(length)))


def _best(fit: _Fit) -> list[SlowStretch]:
    """The stretches that explain the logs best: what is found first is taken out whole, where others explain more without."""
    found = _pursued(fit, [])
    tried: set[SlowPlace] = set()
    while places := [one.who for one in found if one.who not in tried]:
        tried.add(places[0])
        others = _pursued(fit, [one for one in found if one.who != places[0]], excluded=places[0])
        found = others if fit.worth(others) > fit.worth(found) else found
    return found


def _pursued(fit: _Fit, found: list[SlowStretch], excluded: SlowPlace | None = None) -> list[SlowStretch]:
    """More of them, until nothing is left to explain, with their levels as fitted together."""
    found = _exchanged(fit, found, excluded)
    while len(found) < fit.n_stages * fit.n_replicas and (more := fit.best_beside(found, excluded)) is not None:
        found = _exchanged(fit, [*found, more], excluded)
    fitted = fit.fitted(found)
    return [
        msgspec.structs.replace(
            one, levels=tuple(levels), gain=fitted.explained - fit.fitted([*found[:i], *found[i + 1 :]]).explained
        )
        for i, (one, levels) in enumerate(zip(found, fitted.levels.tolist(), strict=True))
    ]


def _exchanged(fit: _Fit, found: list[SlowStretch], excluded: SlowPlace | None) -> list[SlowStretch]:
    """Each in turn taken out and the best put in its place, until that improves nothing."""
    worth, changed = fit.worth(found), True
    while changed:
        changed = False
        for i in range(len(found)):
            rest = [*found[:i], *found[i + 1 :]]
            other = fit.best_beside(rest, excluded)
            choice = rest if other is None else [*rest, other]
            if (value := fit.worth(choice)) > worth + 1e-6:
                found, worth, changed = choice, value, True
                break
    return found


def _despiked(logs: Array, options: DetectorOptions) -> _Data:
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
    around = median_filter(own, size=(1, 1, 2 * options.least_iterations - 1), mode="constant")
    bounded = np.clip(own, around - SPIKE * sigma, around + SPIKE * sigma)
    return _Data(bounded + usual + of_workload, share, sqrt(2 / known) * sigma)


def _workload(logs: Array, share: Array) -> Array:
    """[replica, iteration]: what most rows show."""
    away = logs - np.median(logs, axis=2, keepdims=True)
    return np.asarray(np.median(away / share[:, None, None], axis=0))


def _noise(data: _Data, left: Array, parts: int, options: DetectorOptions) -> _Noise:
    """By what is `left` [row, replica, iteration], typical of so many parts of the recording: while nothing is known to have
    changed, all ranks count for as restless as most are."""
    workload = _workload(left, data.share)

    def typical(series: Array) -> float:
        found = [noise_of(part.tolist(), options.sigma_floor).sigma for part in np.array_split(series, parts)]
        return float(np.median(found))

    own = np.apply_along_axis(typical, 2, left - data.share[:, None, None] * workload)
    sigma = float(np.median(own))
    of_workload = float(np.median(np.apply_along_axis(typical, 1, workload)))
    return _Noise(sigma, own if parts == 1 else np.full_like(own, sigma), of_workload)
