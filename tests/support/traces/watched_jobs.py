"""Synthetic iterations of a TP x PP x DP job of which some devices, or a link, are slow.

Chunk times by the noise file (data/noise.toml); the members of a TP group meet after every chunk, stages in 1F1B, replicas at
the end of the iteration.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unskew.analytics.lab.studies.noise import Noise, chunk_factors, device_factors, load_lengths

Array = NDArray[np.float64]
PAST, RECENT = 20, 10
MICRO_BATCHES = 8
TRANSFER = 0.05
"""What a collective or message takes by itself, as a share of a mean chunk."""
JITTER = 0.3
"""Its standard deviation, of the log."""
MILDEST, SLOWEST = 1.15, 2.0
"""Slowdowns are drawn uniformly."""


class JobShape(NamedTuple):
    tp: int
    pp: int
    dp: int

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


class WatchedJob(NamedTuple):
    """`own_us`, `waits_us` [iteration, replica, stage, shard], `step_us` [iteration], `culprits` flat device indices."""

    own_us: Array
    waits_us: Array
    step_us: Array
    culprits: set[int]


def job(layout: JobShape, n_faults: int, noise: Noise, random: np.random.Generator) -> WatchedJob:
    """One job: `PAST` healthy iterations, then `RECENT` with the slow devices."""
    tp, pp, dp = layout
    n = PAST + RECENT
    work = _work(random, (n, dp, MICRO_BATCHES))
    factors = device_factors(noise, random, n, layout.devices).reshape(n, dp, pp, tp)
    slow = random.choice(layout.devices, n_faults, replace=False)
    factors[PAST:].reshape(RECENT, -1)[:, slow] *= random.uniform(MILDEST, SLOWEST, n_faults)
    own = np.zeros((n, dp, pp, tp))
    in_tp = np.zeros_like(own)
    ends = np.zeros((n, dp, pp))
    step = np.zeros(n)
    in_pp = np.zeros((n, dp, pp))
    for iteration in range(n):
        chunks = {
            kind: 1000.0 * scale * work[iteration][:, None, :, None] * factors[iteration][:, :, None, :]
            * chunk_factors(noise, random, kind, (dp, pp, MICRO_BATCHES, tp))
            for kind, scale in (("F", 1.0), ("B", 2.0))
        }  # fmt: skip
        group = {kind: times.max(axis=3) + _transfers(random, times.shape[:3]) for kind, times in chunks.items()}
        own[iteration] = sum(times.sum(axis=2) for times in chunks.values())
        in_tp[iteration] = sum((group[kind][..., None] - times).sum(axis=2) for kind, times in chunks.items())
        ends[iteration] = pipeline_ends(group["F"], group["B"], random)
        in_pp[iteration] = ends[iteration] - sum(times.sum(axis=2) for times in group.values())
        step[iteration] = ends[iteration].max() + _transfers(random, (1,))[0]
    in_dp = step[:, None, None] - ends
    return WatchedJob(own, in_tp + (in_pp + in_dp)[..., None], step, {int(device) for device in slow})


def pipeline_ends(forward_us: Array, backward_us: Array, random: np.random.Generator) -> Array:
    """When each stage ends its last chunk under 1F1B: [replica, stage]; chunks [replica, stage, micro-batch]."""
    dp, pp, n = forward_us.shape
    hop = _transfers(random, (2, dp, pp, n))
    f_end, b_end = np.zeros((dp, pp, n)), np.zeros((dp, pp, n))
    free = np.zeros((dp, pp))
    order = [
        [("F", m) for m in range(min(pp - s, n))]
        + [one for m in range(n) for one in (("B", m), ("F", m + min(pp - s, n))) if one[0] == "B" or one[1] < n]
        for s in range(pp)
    ]
    at = [0] * pp
    done: set[tuple[str, int, int]] = set()
    while any(at[s] < len(order[s]) for s in range(pp)):
        for s in range(pp):
            while at[s] < len(order[s]):
                kind, m = order[s][at[s]]
                if kind == "F":
                    if s and ("F", s - 1, m) not in done:
                        break
                    ready = f_end[:, s - 1, m] + hop[0, :, s, m] if s else 0.0
                    f_end[:, s, m] = free[:, s] = np.maximum(free[:, s], ready) + forward_us[:, s, m]
                else:
                    if s < pp - 1 and ("B", s + 1, m) not in done:
                        break
                    ready = b_end[:, s + 1, m] + hop[1, :, s, m] if s < pp - 1 else f_end[:, s, m]
                    b_end[:, s, m] = free[:, s] = np.maximum(free[:, s], ready) + backward_us[:, s, m]
                done.add((kind, s, m))
                at[s] += 1
    return free


def links(layout: JobShape, noise: Noise, random: np.random.Generator) -> tuple[Array, int]:
    """Transfers without waiting [iteration, replica, boundary] of a job in which one link is slow, and its flat index.

    A slow link takes 1.2 to 4 times as long (congestion of 17 to 75 %); the mean of an iteration's messages is seen.
    """
    n, shape = PAST + RECENT, (layout.dp, layout.pp - 1)
    own = np.exp(random.normal(0.0, noise.device.static_sd, shape))
    times = np.stack([_transfers(random, (*shape, 2 * MICRO_BATCHES)).mean(axis=2) for _ in range(n)]) * own
    slow = int(random.integers(own.size))
    times[PAST:].reshape(RECENT, -1)[:, slow] *= random.uniform(1.2, 4.0)
    return times, slow


def _work(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Relative work of micro-batches: packed documents of the shipped lengths, attention a third of it on average."""
    quantiles = load_lengths("prolong")
    lengths = np.minimum(random.choice(quantiles, (*shape, 8)), 16_384.0)
    squares = (lengths**2).sum(axis=-1)
    return np.asarray(2 / 3 + squares / squares.mean() / 3)


def _transfers(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray(2000.0 * TRANSFER * np.exp(random.normal(0.0, JITTER, shape)))
