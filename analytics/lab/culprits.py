"""Who holds the others up, among thousands: devices and links ranked by their own time.

Under a barrier everybody's step takes equally long, so the step's time flags nobody. Two things do:

* measured work: the time of a device's chunks, before the collective or message that would hide it;
* waiting: who waits least. A device's own time is the step's time less all its waiting, so where only collectives and messages
  are seen, with the waiting inside them, the rest of the step is the work (`own_from_waits`).

`rank_devices` then compares only what is equal:

1. the members of a TP group work on the same micro-batch, so each is compared with its group: the workload cancels;
2. where a group has fewer than three members, a stage is compared with the same stage of the other replicas, after its
   replica's workload (the median over its stages, each over its own usual share) is taken out; stages are never compared
   with each other;
3. each with its own past: what a healthy device shows by itself (2 % between equal devices) is not held against it.

Links likewise (`rank_links`): a transfer's time from the moment both sides were there, against the links of the
same role in the other replicas, and against its own past.

All medians, so that spikes of single iterations and less than half of a group being slow do not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_GROUP = 3
"""Members that a group needs for its median to show who differs."""


class Ranking(NamedTuple):
    """`excess`: log of how much longer than it should take, per device [replica, stage, shard] or link [replica, boundary];
    `order`: flat indices of `excess`, the most suspicious first."""

    excess: Array
    order: Ints

    def first(self, n: int) -> set[int]:
        """The `n` most suspicious."""
        return {int(index) for index in self.order[:n]}


def own_from_waits(step_us: Array, waits_us: Array) -> Array:
    """Own time [iteration, replica, stage, shard] where only waiting is seen.

    `step_us` [iteration]; `waits_us` [iteration, replica, stage, shard]: the sum of the durations of a device's collectives and
    messages, waiting inside. What a transfer takes by itself is in it for all alike.
    """
    return np.asarray(step_us[:, None, None, None] - waits_us)


def rank_devices(own_us: Array, n_recent: int) -> Ranking:
    """Devices by the excess of their own time in the last `n_recent` iterations over the ones before (their past).

    `own_us` [iteration, replica, stage, shard], positive. Raises `ValueError` when nothing is left of the past.
    """
    logs = np.log(np.maximum(own_us, 1e-9))
    if own_us.shape[3] >= LEAST_GROUP:
        relative = logs - np.median(logs, axis=3, keepdims=True)
        # The whole group can be slow (its host, its switch): the group against its role, as if it were one device.
        group = _against_roles(np.median(logs, axis=3, keepdims=True), n_recent)
        return _ranked(_change(relative, n_recent) + np.maximum(group - _noise(group), 0.0))
    return _ranked(_against_roles(logs, n_recent))


def rank_links(transfer_us: Array, n_recent: int) -> Ranking:
    """Links by the excess of their transfers: [iteration, replica, boundary], without waiting, positive."""
    logs = np.log(np.maximum(transfer_us, 1e-9))
    return _ranked(_change(logs - np.median(logs, axis=1, keepdims=True), n_recent))


def _against_roles(logs: Array, n_recent: int) -> Array:
    """Excess of stages over their role in the other replicas, their replica's workload taken out."""
    usual = np.median(logs[:-n_recent], axis=(0, 1), keepdims=True)
    replica = np.median(logs - usual, axis=(2, 3), keepdims=True)
    unloaded = logs - replica
    return _change(unloaded - np.median(unloaded, axis=1, keepdims=True), n_recent)


def _change(relative: Array, n_recent: int) -> Array:
    if not 0 < n_recent < len(relative):
        raise ValueError(f"{len(relative)} iterations leave no past before the last {n_recent}")
    return np.asarray(np.median(relative[-n_recent:], axis=0) - np.median(relative[:-n_recent], axis=0))


def _noise(excess: Array) -> float:
    """Five robust standard deviations: what some healthy one of thousands may show."""
    return float(5 * 1.4826 * np.median(np.abs(excess - np.median(excess))))


def _ranked(excess: Array) -> Ranking:
    return Ranking(excess, np.argsort(-excess, axis=None, kind="stable"))
