"""Chance in a simulated job: what the detector finds and measures, and how wrong the policy's estimates are.

Every happening and every use of it has a stream of its own, so policies that are compared under one seed meet the same luck,
whatever each of them did before.
"""

from __future__ import annotations

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent

_NOISE, _FOUND, _MEASURED, _DELAY, _PAUSES = range(5)


class SeededRandomness:
    """`estimate_error`: the largest share by which something that the policy estimates is off, without its knowing;
    `speed_error`: the standard deviation of a measured speed."""

    def __init__(self, seed: int, estimate_error: float, speed_error: float) -> None:
        self._seed, self._estimate_error, self._speed_error = seed, estimate_error, speed_error
        self.noise = np.random.default_rng([seed, _NOISE])

    def found(self, event: ClusterEvent, recall: float) -> bool:
        """Does a detector with this recall find the slow phase?"""
        return bool(self._stream(_FOUND, event).random() <= recall)

    def measured(self, event: ClusterEvent) -> float:
        """A measured speed over the true one."""
        stream = self._stream(_MEASURED, event)
        return (1.0 + self._speed_error * float(stream.standard_normal())) * self._wrong(stream)

    def delay(self, event: ClusterEvent) -> float:
        """The detector's delay over the one that is estimated."""
        return self._wrong(self._stream(_DELAY, event))

    def pauses(self, event: ClusterEvent, count: int) -> list[float]:
        """Each pause over the one that is estimated."""
        stream = self._stream(_PAUSES, event)
        return [self._wrong(stream) for _ in range(count)]

    def _stream(self, use: int, event: ClusterEvent) -> np.random.Generator:
        return np.random.default_rng([self._seed, use, int(event.at_s * 1e6)])

    def _wrong(self, stream: np.random.Generator) -> float:
        error = self._estimate_error
        return 1.0 if error == 0 else float(1.0 + stream.uniform(-error, error))
