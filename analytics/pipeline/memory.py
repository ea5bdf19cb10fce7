"""What a rank keeps in memory: its layers, and activations of micro-batches in flight.

Activations of a chunk are kept from the start of its forward to the end of its backward; where the backward pass is split, to
the end of its weights' gradient. A layer is kept with its parameters, both moments and its gradient; while a chunk adds to the
gradients of its layers, what it adds is there beside them; and a bucket is summed in a copy. Not counted: buffers of messages,
what a chunk needs for a moment, the allocator's waste.

>>> from unskew.analytics.core.layout import uniform_plan
>>> plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=2, micro_batches=4)
>>> memory = LayerMemory(gradient_bytes=(100, 100), token_bytes=(4.0, 4.0), cut_token_bytes=(0.0, 0.0), bucket_bytes=100)
>>> peak_bytes(plan, memory, tokens=10)
{0: 580.0, 1: 540.0}
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.dag import Array, Chunks
from unskew.analytics.pipeline.gradient_sync import MOST_IN_FLIGHT, buckets_of
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.shards.parts import size_of

KEPT_WITH_GRADIENT = 3
"""A parameter and both moments take as much each as its gradient."""


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of each whole layer: its gradients, and its activations for each token, those that all members of a tensor-parallel group
    have, and those that they divide. `bucket_bytes`: as in `GradientSync`."""

    gradient_bytes: tuple[int, ...]
    token_bytes: tuple[float, ...]
    cut_token_bytes: tuple[float, ...]
    bucket_bytes: int


def peak_bytes(plan: Plan, memory: LayerMemory, tokens: int) -> dict[int, float]:
    """Rank -> the most bytes that it keeps at once under `plan`, with micro-batches of at most so many tokens."""
    schedule = build_schedule(plan)
    ending = "W" if any(action.kind == "W" for action in schedule.order) else "B"
    buckets = buckets_of(plan, memory.gradient_bytes, memory.bucket_bytes)
    found = {}
    for role in plan.roles:
        share = size_of(role.part)
        gradients = np.array(memory.gradient_bytes) * share
        kept = tokens * (np.array(memory.token_bytes) + share * np.array(memory.cut_token_bytes))
        in_flight = most = last = 0.0
        for action in schedule.by_rank[role.rank]:
            layers = slice(action.first_layer, action.first_layer + action.n_layers)
            last = float(kept[layers].sum())
            in_flight += last * (action.kind == "F")
            most = max(most, in_flight + float(gradients[layers].sum()) * (action.kind != "F"))
            in_flight -= last * (action.kind == ending)
        copies = sorted((one.n_bytes for one in buckets if role.rank in one.ranks), reverse=True)[:MOST_IN_FLIGHT]
        held = (KEPT_WITH_GRADIENT + 1) * float(gradients[list(role.layers)].sum())
        found[role.rank] = held + max(most, last + sum(copies))
    return found


def peak_activations(chunks: Chunks, activation_bytes: Array) -> dict[int, float]:
    """rank -> most bytes of activations kept at once, for `activation_bytes` [hop] of one micro-batch.

    A rank works on one chunk at a time, so the order alone decides.
    """
    weights = chunks.are("W")
    released = weights if weights.any() else chunks.are("B")
    steps = (chunks.are("F").astype(float) - released) * activation_bytes[chunks.hop]
    return {rank: float(np.cumsum(steps[positions]).max()) for rank, positions in chunks.rank_positions()}
