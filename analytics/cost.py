"""What a chunk, a message and an iteration's end cost: one cost model for predictor, detector, scheduler and sleeping device.

A chunk of `n` layers takes ``n * (a + b * tokens + c * sum_sq) / speed`` microseconds, plus, where it includes the output head,
``head * tokens / speed``. The coefficients are per kind of work (F, B, W) and hold for a healthy device (speed 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unskew.analytics.workload import Work

Speeds = Mapping[int, Mapping[str, float]]
"""rank -> kind of work -> speed; a missing rank or kind is healthy (1.0)."""

HEALTHY: Speeds = {}


def speed_of(speeds: Speeds, rank: int, kind: str) -> float:
    """The speed of a rank for one kind of work; 1.0 when nothing is known against it."""
    return speeds.get(rank, {}).get(kind, 1.0)


class ChunkCost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Coefficients of one kind of work, per layer: us, us/token, us/token^2; `head_us_per_token` for the output head."""

    layer_us: float
    token_us: float
    token2_us: float
    head_us_per_token: float = 0.0

    def us(self, work: Work, n_layers: int, has_head: bool) -> float:
        """Microseconds of a chunk of `n_layers` on a healthy device."""
        per_layer = self.layer_us + self.token_us * work.tokens + self.token2_us * work.sum_sq
        return n_layers * per_layer + (self.head_us_per_token * work.tokens if has_head else 0.0)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Chunk costs per kind, one message's latency between ranks, and the end of an iteration (gradients, vote, optimiser)."""

    chunks: dict[str, ChunkCost]
    message_us: float = 0.0
    iteration_end_us: float = 0.0

    def chunk_us(self, kind: str, work: Work, n_layers: int, *, has_head: bool, speed: float = 1.0) -> float:
        """Microseconds of one chunk at `speed`."""
        return self.chunks[kind].us(work, n_layers, has_head) / speed
