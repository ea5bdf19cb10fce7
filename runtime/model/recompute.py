"""What of a chunk is kept between its forward and its backward pass: its graph, or what its layers were given.

A rank that recomputes (`Role.recompute`) keeps of each layer the input alone, and executes its forward once more right before
its backward: activation checkpointing layer by layer. Not `torch.utils.checkpoint`: its first call imports torch._dynamo, a
second of work in each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor


class KeptLayers(msgspec.Struct):
    """Layers ``[first, end)`` of a chunk: they were given `x` and gave `y`; None = that is to be computed again, with the
    generator's state `random`."""

    first: int
    end: int
    x: Tensor
    y: Tensor | None
    random: Tensor | None = None


def forward_keeping_inputs(
    x: Tensor, first: int, end: int, forward: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, list[KeptLayers]]:
    """What layers ``[first, end)`` give, and of each what it was given."""
    kept = []
    with torch.no_grad():
        for layer in range(first, end):
            kept.append(KeptLayers(layer, layer + 1, x, None, _random_state(x.device)))
            x = forward(layer, x)
    return x, kept


def backward(kept: list[KeptLayers], dy: Tensor | None, forward: Callable[[int, Tensor], Tensor]) -> None:
    """Leave the gradients of these layers, the last ones first, in their parameters and in the first one's input."""
    for one in reversed(kept):
        y = one.y
        if y is None:
            if one.x.is_floating_point():
                one.x.requires_grad_(True)
            with _random(one):
                y = forward(one.first, one.x)
        if y.requires_grad:
            torch.autograd.backward(y, dy)
        if one.x.requires_grad and one.x.grad is None:  # what is below waits for a gradient all the same
            one.x.grad = torch.zeros_like(one.x)
        dy = one.x.grad
        if one is not kept[0]:
            one.x.grad = None


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _random(one: KeptLayers) -> Iterator[None]:
    """What is drawn within is what was drawn then."""
    on_gpu = one.x.device.type == "cuda"
    with torch.random.fork_rng([one.x.device] if on_gpu else []):
        if one.random is not None and on_gpu:
            torch.cuda.set_rng_state(one.random, one.x.device)
        elif one.random is not None:
            torch.set_rng_state(one.random)
        yield
