"""What a rank must keep in memory, over time: its parameters' state, and the activations of micro-batches in flight.

A parameter takes 18 bytes while it is trained in mixed precision: weight in BF16 (2), gradient in FP32 (4), master weight and
two moments in FP32 (12). Activations of a chunk are kept from the start of its forward to the end of its backward; where the
backward pass is split, to the end of its weights' gradient. Not counted: buffers of messages, the logits, the allocator's
waste.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from unskew.analytics.pipeline.chunks import Chunks, Flags
from unskew.analytics.pipeline.dag import Array

BYTES_PER_PARAMETER = 18


class Usage(msgspec.Struct, frozen=True):
    """One rank's memory as steps: from `at_us[i]` on it holds `bytes[i]`. `peak_bytes` is the largest."""

    at_us: Array
    bytes: Array

    @property
    def peak_bytes(self) -> float:
        return float(self.bytes.max())


def memory_over_time(
    chunks: Chunks, start_us: Array, end_us: Array, activation_bytes: Array, parameters: Mapping[int, int]
) -> dict[int, Usage]:
    """rank -> usage. `start_us`, `end_us` [chunk]; `activation_bytes` [hop] of one micro-batch, or [hop, micro-batch];
    `parameters`: how many each rank trains."""
    kept, forward, release = _kept(chunks, activation_bytes), chunks.are("F"), _releasing(chunks)
    found = {}
    for rank, positions in chunks.rank_positions():
        held = float(parameters.get(rank, 0) * BYTES_PER_PARAMETER)
        takes = positions[forward[positions]]
        gives = positions[release[positions]]
        times = np.concatenate([[0.0], start_us[takes], end_us[gives]])
        steps = np.concatenate([[held], kept[takes], -kept[gives]])
        # What is released at the moment when something else begins is released first.
        order = np.lexsort((steps > 0, times))
        found[rank] = Usage(times[order], np.cumsum(steps[order]))
    return found


def peak_activations(chunks: Chunks, activation_bytes: Array) -> dict[int, float]:
    """rank -> most bytes of activations kept at once. A rank works on one chunk at a time, so the order alone decides."""
    kept = _kept(chunks, activation_bytes)
    sign = chunks.are("F").astype(float) - _releasing(chunks)
    return {rank: float(np.cumsum((sign * kept)[positions]).max()) for rank, positions in chunks.rank_positions()}


def _releasing(chunks: Chunks) -> Flags:
    """Which chunks end what their forward kept."""
    weights = chunks.are("W")
    return weights if weights.any() else chunks.are("B")


def _kept(chunks: Chunks, activation_bytes: Array) -> Array:
    if activation_bytes.ndim == 1:
        return np.asarray(activation_bytes[chunks.hop], dtype=np.float64)
    return np.asarray(activation_bytes[chunks.hop, chunks.micro_batch], dtype=np.float64)
