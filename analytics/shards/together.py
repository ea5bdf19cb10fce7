"""What the members of a tensor-parallel group exchange within a chunk, and in how many steps.

A collective goes round the members as a ring: a gather in k - 1 steps, a sum in twice as many, each with a k-th of the tensor.
So one price of a step, per message and per token that it carries, holds for groups of any size (`CostModel.sum_us`), and
emulated devices take it (runtime/links.py). Where a group is sequence-parallel (Korthikanti et al. 2022, section 4.2.2), a sum
is divided: each member takes the sum of its own tokens (as long as a gather), and what is cut gathers them all before it; the
backward pass gathers them once more instead of keeping them, and sums the gradients of norms.

>>> sums_in("F", 4, first=True, last=False), steps_of_sum(2)
(9.0, 2)
"""

from __future__ import annotations


def sums_in(
    kind: str, n_layers: int, *, first: bool, last: bool, again: bool = False, sequence_parallel: bool = False
) -> float:
    """How many sums of hidden states a chunk has, a gather as half of one: two per layer, behind its halves forward and in
    front of them backward, one more for the embedding forward and for the head backward; gradients of weights need none. The
    loss's small gather is left out. `again`: with the forward once more."""
    if kind == "W":
        return 0.0
    forward = sums_in("F", n_layers, first=first, last=last, sequence_parallel=sequence_parallel) if again else 0.0
    if not sequence_parallel:
        return forward + 2.0 * n_layers + (first if kind == "F" else last)
    return forward + (2.0 * n_layers + 0.5 * (first + last) if kind == "F" else 3.0 * n_layers + 0.5 * first + last)


def norms_in(kind: str, n_layers: int, *, last: bool) -> int:
    """How many norms' gradients the members of a sequence-parallel group sum at the end of a chunk, at once: each is as large
    as a token's hidden state."""
    return 2 * n_layers + last if kind == "B" else 0


def steps_of_sum(members: int) -> int:
    """Steps of a sum of so many members; a gather takes half as many."""
    return 2 * (members - 1)
