"""The workload of micro-batches whose lengths nobody logged, inferred from peers.

The same micro-batch costs much or little on every stage, forward and backward: what its other chunks took shows what a chunk
should take. Steps, for chunk times t[kind, stage, micro-batch] (micro-batches of all iterations and replicas in a row):

1. a standard score per (kind, stage): ``z = (t - median) / (1.4826 x median distance from it)``;
2. a chunk's workload is the mean z of the same micro-batch on the other stages (`others="stage"`), where there is one stage
   only of its other kinds (`others="kind"`): a device that is slow does not explain itself;
3. expected time: ``c0 + c1 z + c2 z^2``, robust relative least squares (Huber) per (kind, stage). The square, because backward
   grows faster with the length of documents than forward.

It does not see a slow stage (that is its normal), nor, with one stage, a device whose forward and backward are slow alike.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from sklearn.linear_model import LinearRegression  # type: ignore[import-untyped]  # ships no types

from unskew.analytics.pipeline.dag import Array

HUBER = 1.5
ROUNDS = 15
LEAST_CHUNKS = 8
"""With fewer micro-batches than this nothing is inferred: three coefficients would fit noise."""


class InferredWorkload(msgspec.Struct, frozen=True):
    """`expected_us` like the times given; `correlation`: of forward's with backward's z over all micro-batches, None without
    both."""

    expected_us: Array
    workload: Array
    correlation: float | None


def infer(times_us: Array, kinds: tuple[str, ...], others: Literal["stage", "kind"]) -> InferredWorkload:
    """Expected chunk times from peers: `times_us` [kind, stage, micro-batch]. Raises `ValueError` for too few micro-batches."""
    n_kinds, n_stages, n = times_us.shape
    if n < LEAST_CHUNKS:
        raise ValueError(f"the workload of {n} micro-batches cannot be inferred from peers, at least {LEAST_CHUNKS} are needed")
    middle = np.median(times_us, axis=2, keepdims=True)
    spread = 1.4826 * np.median(np.abs(times_us - middle), axis=2, keepdims=True)
    z = (times_us - middle) / np.maximum(spread, 1e-9 + 1e-6 * middle)
    workload = np.empty_like(z)
    for kind in range(n_kinds):
        for stage in range(n_stages):
            of_others = np.delete(z, stage, axis=1).reshape(-1, n)
            data_parallel_peers = of_others if others == "stage" else np.delete(z[:, stage], kind, axis=0)
            workload[kind, stage] = data_parallel_peers.mean(axis=0)
    expected = np.empty_like(z)
    for kind in range(n_kinds):
        for stage in range(n_stages):
            expected[kind, stage] = fit_curve(workload[kind, stage], times_us[kind, stage])(workload[kind, stage])
    correlation = None
    if {"F", "B"} <= set(kinds):
        forward, backward = (z[kinds.index(kind)].mean(axis=0) for kind in "FB")
        correlation = float(np.corrcoef(forward, backward)[0, 1]) if forward.std() and backward.std() else 0.0
    return InferredWorkload(np.maximum(expected, 1e-9), workload, correlation)


class WorkloadCurve(msgspec.Struct, frozen=True):
    """Chunk time as a function of workload: ``c0 + c1 z + c2 z^2``."""

    coefficients: tuple[float, float, float]

    def __call__(self, workload: Array) -> Array:
        c0, c1, c2 = self.coefficients
        return c0 + c1 * workload + c2 * workload**2


def fit_curve(workload: Array, times_us: Array) -> WorkloadCurve:
    """Huber regression of relative residuals."""
    design = np.stack([workload, workload**2], axis=1)
    predicted, trust = times_us, np.ones(len(times_us))
    model = LinearRegression()
    for _ in range(ROUNDS):
        weights = trust / np.maximum(predicted, 1e-9) ** 2
        model.fit(design, times_us, sample_weight=weights / weights.mean())
        predicted = np.maximum(model.predict(design), 1e-3 * times_us.mean())
        residual = np.abs(times_us / predicted - 1)
        scale = max(1.4826 * float(np.median(residual)), 1e-9)
        trust = np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-12))
    return WorkloadCurve((float(model.intercept_), float(model.coef_[0]), float(model.coef_[1])))
