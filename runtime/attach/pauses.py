"""What interrupts a training loop and is no step's work: garbage collections, checkpoints, evaluations. Public names only.

Each is a piece of its own; where it falls into another (a collection into a forward pass), readers take it out of that one's
own time (collector/files/loop_parts.py).

Of torchtitan's structured log, which says it while it is written: fetching a batch, for loaders of any kind, and the valid
tokens of a step. The log stays as it is, with the handlers that `TITAN_STRUCT_LOGGER_HANDLERS` names: we are one listener more.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from time import monotonic_ns
from types import ModuleType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from unskew.runtime.attach.session import LoopSession

TORCHTITAN = "torchtitan.observability.structured_logger.structured_logging"
FETCHING, SCALAR, TOKENS = "fetching_batch", "metric_value", "local_valid_tokens"
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
            before, loop.activity = loop.activity, "idle"
            try:
                return original(*arguments, **named)
            finally:
                nested, loop.activity = False, before
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


def listen_to_torchtitan(session: LoopSession, module: ModuleType) -> None:
    """From now on. Raises `AttributeError` where its logger is no longer there."""
    module._structured_logger.addHandler(_Listener(session))


class _Listener(logging.Handler):
    def __init__(self, session: LoopSession) -> None:
        super().__init__(logging.INFO)
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        if (loop := self._session.loop()) is None:
            return
        name = getattr(record, "log_type_name", "")
        try:
            if name == f"{FETCHING}_start":
                loop.loading()
            elif name == f"{FETCHING}_end":
                loop.loaded(())
            elif name == SCALAR and getattr(record, "event_name", "") == TOKENS:
                loop.note(int(getattr(record, "value", 0)), None)
        except Exception as error:
            self._session.failed(error)
