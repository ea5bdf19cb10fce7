"""Logs of chunk times as the fit takes them: no iteration stands out by itself, rows know their share of the workload, and
there is a noise of ranks and of workloads."""

from __future__ import annotations

from math import sqrt

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.series.noise import noise_of
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
