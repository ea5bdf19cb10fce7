"""What a rank must keep of micro-batches in flight.

Activations of a chunk are kept from the start of its forward to the end of its backward; where the backward pass is split, to
the end of its weights' gradient. Not counted: buffers of messages, the logits, the allocator's waste.
"""

from __future__ import annotations

import numpy as np

from unskew.analytics.pipeline.dag import Array, Chunks


def peak_activations(chunks: Chunks, activation_bytes: Array) -> dict[int, float]:
    """rank -> most bytes of activations kept at once, for `activation_bytes` [hop] of one micro-batch.

    A rank works on one chunk at a time, so the order alone decides.
    """
    weights = chunks.are("W")
    released = weights if weights.any() else chunks.are("B")
    steps = (chunks.are("F").astype(float) - released) * activation_bytes[chunks.hop]
    return {rank: float(np.cumsum(steps[positions]).max()) for rank, positions in chunks.rank_positions()}
