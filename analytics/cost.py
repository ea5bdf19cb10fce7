"""What a chunk, a message and an iteration's end cost: one cost model for predictor, detector, scheduler and sleeping device.

A chunk of `n` layers takes ``n * (a + b * tokens + c * sum_sq) / speed`` microseconds, plus, where it includes the output head,
``head * tokens / speed``. The coefficients are per kind of work (F, B, W) and hold for a healthy device (speed 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import exp

import msgspec

from unskew.analytics.plan import Plan
from unskew.analytics.workload import Work

Speeds = Mapping[int, Mapping[str, float]]
"""rank -> kind of work -> speed; a missing rank or kind is healthy (1.0)."""

HEALTHY: Speeds = {}


def speed_of(speeds: Speeds, rank: int, kind: str) -> float:
    """The speed of a rank for one kind of work; 1.0 when nothing is known against it."""
    return speeds.get(rank, {}).get(kind, 1.0)


@lru_cache(maxsize=256)
def _chain(groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> int:
    """The longest chain of gradient groups of which each shares a rank with the one before."""
    behind: dict[int, int] = {}
    for ranks, _ in groups:
        if len(ranks) > 1:
            place = 1 + max(behind.get(rank, 0) for rank in ranks)
            behind.update(dict.fromkeys(ranks, place))
    return max(behind.values(), default=0)


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


class CostModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Chunk costs per kind, one message's latency between ranks, and the end of an iteration (gradients, vote, optimiser).

    `iteration_end_us` is that of a plan whose gradient collectives all run at once; see `end_us`.

    Without a "W" of its own, "B" is the whole backward pass; with it, the gradient of activations alone. `bars`: kind of
    work, or "iteration" -> half-width of the prediction's 90 % error bar, as the log of a ratio (predictor.py); absent = not
    known.
    """

    chunks: dict[str, ChunkCost]
    message_us: float = 0.0
    iteration_end_us: float = 0.0
    collective_us: float = 0.0
    bars: dict[str, float] = {}

    @cached_property
    def joined(self) -> CostModel:
        """The model for schedules that do not split the backward pass: B = gradient of activations and of weights."""
        if "W" not in self.chunks:
            return self
        b, w = self.chunks["B"], self.chunks["W"]
        whole = ChunkCost(**{field: getattr(b, field) + getattr(w, field) for field in ChunkCost.__struct_fields__})
        return msgspec.structs.replace(self, chunks={"F": self.chunks["F"], "B": whole})

    @cached_property
    def split(self) -> CostModel:
        """The model for schedules that split it. What was measured only as a whole is split by what the maths says: attention
        has no weights, so W has half of the linear part (one of two equal products) and nothing of the quadratic one."""
        if "W" in self.chunks or "B" not in self.chunks:
            return self
        whole = self.chunks["B"]
        w = ChunkCost(
            layer_us=whole.layer_us / 2,
            token_us=whole.token_us / 2,
            token2_us=0.0,
            head_us_per_token=whole.head_us_per_token / 2,
        )
        b = msgspec.structs.replace(w, token2_us=whole.token2_us)
        return msgspec.structs.replace(self, chunks={"F": self.chunks["F"], "B": b, "W": w})

    def interval_us(self, what: str, us: float) -> tuple[float, float] | None:
        """Where nine in ten measurements lie when `us` is predicted for a chunk of kind `what`, or for an "iteration"."""
        bar = self.bars.get(what)
        return None if bar is None else (us * exp(-bar), us * exp(bar))

    def end_us(self, plan: Plan) -> float:
        """The end of an iteration under `plan`: each collective that has to wait for another one adds `collective_us`.

        Ranks reduce their groups in one order, so groups that share a rank follow each other: with uneven partitions they form
        a chain from the first stage to the last (seven deep at PP4 x DP2), where equal ones run side by side.
        """
        return self.iteration_end_us + self.collective_us * max(_chain(plan.gradient_groups) - 1, 0)

    def chunk_us(self, kind: str, work: Work, n_layers: int, *, has_head: bool, speed: float = 1.0) -> float:
        """Microseconds of one chunk at `speed`."""
        return self.chunks[kind].us(work, n_layers, has_head) / speed
