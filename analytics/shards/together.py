"""What the members of a tensor-parallel group exchange within a chunk, and in how many steps.

A collective goes round the members as a ring: a gather in k - 1 steps, a sum in twice as many, each with a k-th of the tensor.
So one price of a step, per message and per token that it carries, holds for groups of any size (`CostModel.sum_us`), and
emulated devices take it (runtime/links.py). Where a group is sequence-parallel (Korthikanti et al. 2022, section 4.2.2), a sum
is divided: each member takes the sum of its own tokens (as long as a gather), and what is cut gathers them all before it; the
backward pass gathers them once more instead of keeping them, and sums the gradients of norms.

>>> sums_in("F", 0, 4, blocks(8)), steps_of_sum(2)
(9.0, 2)
"""

from __future__ import annotations

from functools import lru_cache

LayerSums = tuple[tuple[int, int], ...]
"""Of each layer, how many sums of hidden states it has: forward, behind what is cut by rows, and backward, in front of what is
cut by columns."""


@lru_cache
def blocks(n_layers: int) -> LayerSums:
    """Each layer has two cut by columns and two by rows; besides, the first one has the embedding and the last one the head."""
    return tuple((2 + (layer == 0), 2 + (layer == n_layers - 1)) for layer in range(n_layers))


def sums_in(
    kind: str, first_layer: int, n_layers: int, of: LayerSums, *, again: bool = False, sequence_parallel: bool = False
) -> float:
    """How many sums of hidden states a chunk has, a gather as half of one; gradients of weights need none. The loss's small
    gather is left out. `again`: with the forward once more."""
    if kind == "W":
        return 0.0
    layers = of[first_layer : first_layer + n_layers]
    rows, columns = sum(rows for rows, _ in layers), sum(columns for _, columns in layers)
    once, back = (0.5 * (rows + columns), 0.5 * rows + columns) if sequence_parallel else (float(rows), float(columns))
    if kind == "F":
        return once
    return back + once if again else back


def norms_in(kind: str, first_layer: int, n_layers: int, of: LayerSums) -> int:
    """How many norms' gradients the members of a sequence-parallel group sum at the end of a chunk, at once: each is as large
    as a token's hidden state, and in front of what is cut by columns."""
    return sum(backward for _, backward in of[first_layer : first_layer + n_layers]) if kind == "B" else 0


def steps_of_sum(members: int) -> int:
    """Steps of a sum of so many members; a gather takes half as many."""
    return 2 * (members - 1)
