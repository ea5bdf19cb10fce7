"""What interrupts a training loop and is no step's work: garbage collections, checkpoints, evaluations. Public names only.

Each is a piece of its own; where it falls into another (a collection into a forward pass), readers take it out of that one's
own time (collector/files/loop_parts.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from unskew.runtime.attach.session import LoopSession

LEAST_NS = 100_000
"""Shorter pauses stay in what they interrupt."""


def collections(session: LoopSession) -> None:
    """Of Python's garbage, on the loop's thread."""
    begun_ns = 0

    def collected(phase: str, _: object) -> None:
        nonlocal begun_ns
        if phase == "start":
            begun_ns = monotonic_ns()
        elif monotonic_ns() - begun_ns >= LEAST_NS and (loop := session.loop()) is not None:
            loop.collected(begun_ns)

    gc.callbacks.append(collected)


def saving(session: LoopSession) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps what writes a checkpoint; one within another is part of it."""
    nested = False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*arguments: Any, **named: Any) -> Any:
            nonlocal nested
            if nested or is_compiling() or (loop := session.loop()) is None:
                return original(*arguments, **named)
            since, nested = loop.moment(), True
            try:
                return original(*arguments, **named)
            finally:
                nested = False
                if (until := loop.moment())[0] - since[0] >= LEAST_NS:
                    loop.paused("checkpoint", since, until)

        return save

    return wrap


def evaluating(session: LoopSession) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps `Module.train`, which `eval()` calls too; its calls for the parts of a model are none of their own."""
    nested = False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            nonlocal nested
            if nested or is_compiling() or (loop := session.loop()) is None:
                return original(module, mode)  # type: ignore[no-any-return]
            nested = True
            try:
                return original(module, mode)  # type: ignore[no-any-return]
            finally:
                nested = False
                loop.trains(id(module)) if mode else loop.evaluates(id(module))

        return train

    return wrap
