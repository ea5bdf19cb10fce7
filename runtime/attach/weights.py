"""What acting takes hold of in torch: the gradient of a rank, weighted by what its samples are of a batch that is divided
unevenly, and the group of a DDP model.

A loop whose loss is the mean over its rank's own samples would count each sample of a small batch for more than one of a large
one. The gradient that `backward()` begins with carries the weight, so that no line of the loop changes. A loop that divides by
all ranks' samples or tokens itself needs none. Which of them it is shows the graph of its loss, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

Loss = Literal["mean", "global", "unknown"]
REDUCTIONS: dict[int, Loss] = {1: "mean", 2: "global"}
"""What torch's losses keep in their graph: the mean, or the sum."""
MOST_NODES = 200
"""Of the graph between the loss and what reduces it to one value."""
OWN = 1.01
"""A sum that is divided by no more than this times the rank's own targets is their mean."""

_weight: Callable[[], float] = lambda: 1.0  # noqa: E731
_seen: Callable[[Any], None] = lambda _: None  # noqa: E731
_nested = False


def weigh(weight: Callable[[], float], seen: Callable[[Any], None]) -> None:
    """From now on `backward()` of a loss begins with `weight()`; `seen` is given each such loss before."""
    global _weight, _seen
    _weight, _seen = weight, seen
    if not hasattr(torch.autograd.backward, "unskew_weighs"):
        _wrap()


def _wrap() -> None:
    original: Callable[..., Any] = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> Any:
        global _nested  # noqa: PLW0603 - the same
        one = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
        if _nested or not one or is_compiling():
            return original(tensors, grad_tensors, *arguments, **named)
        _seen(tensors)
        if (weight := _weight()) != 1.0:
            grad_tensors = torch.full_like(tensors, weight) if grad_tensors is None else grad_tensors * weight
        _nested = True
        try:
            return original(tensors, grad_tensors, *arguments, **named)
        finally:
            _nested = False

    backward.unskew_weighs = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def loss_of(root: torch.Tensor) -> Loss:
    """How a loss is reduced: by the mean over the rank's own targets, or a sum divided by more than those (all ranks')."""
    found: set[Loss] = set()
    nodes, looked_at = [(root.grad_fn, 0.0)], 0
    while nodes and looked_at < MOST_NODES:
        node, divisor = nodes.pop()
        looked_at += 1
        if node is None:
            continue
        name = type(node).__name__
        reduction = REDUCTIONS.get(getattr(node, "_saved_reduction", 0))
        if name.startswith("MeanBackward") or reduction == "mean":
            found.add("mean")
        elif reduction == "global":
            found.add(_of_sum(divisor, _targets(node)))
        elif name.startswith("SumBackward"):
            found.add("unknown")
        elif name in _SCALAR:
            below = _divisor(node) or divisor
            nodes += [(of, below) for of, _ in node.next_functions]
        else:
            found.add("unknown")
    return found.pop() if len(found) == 1 else "unknown"


_SCALAR = {f"{name}Backward0" for name in ("Add", "Div", "Mul", "Neg", "Clone", "View", "ToCopy", "Squeeze", "Sub", "Alias")}
"""What may lie between the reduction and the loss."""


def _divisor(node: Any) -> float:
    """By what a division divides; 0.0 = it is none, or not known."""
    if type(node).__name__ != "DivBackward0":
        return 0.0
    other = getattr(node, "_saved_other", None)
    if isinstance(other, torch.Tensor):
        return float(other) if other.numel() == 1 else 0.0
    return float(other) if isinstance(other, int | float) else 0.0


def _targets(node: Any) -> int:
    """The rank's own targets of a loss that is a sum."""
    target = getattr(node, "_saved_target", None)
    if not isinstance(target, torch.Tensor):
        return 0
    ignored = getattr(node, "_saved_ignore_index", None)
    return target.numel() if ignored is None else int((target != ignored).sum())


def _of_sum(divisor: float, own: int) -> Loss:
    if not divisor or not own:
        return "unknown"
    return "mean" if divisor <= own * OWN else "global"


def can_shrink(model: object) -> bool:
    """Whether a rank can leave the living job of this model."""
    return isinstance(model, DistributedDataParallel) and hasattr(model, "_update_process_group")


def shrink(model: Any, group: Any) -> None:
    """Let a DDP model go on in a smaller group; whoever is not in it has left."""
    model._update_process_group(group)
