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
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from unskew.collector.files.loop_parts import Moment
from unskew.runtime.attach.session import LoopSession
from unskew.runtime.attach.timeline import LoopTimeline

TORCHTITAN = "torchtitan.observability.structured_logger.structured_logging"
FETCHING, SCALAR, TOKENS = "fetching_batch", "metric_value", "local_valid_tokens"
LEAST_NS = 100_000
"""Shorter pauses stay in what they interrupt."""


def collections(session: LoopSession) -> None:
    """Of Python's garbage, on the loop's thread."""
    begun: Moment | None = None

    def collected(phase: str, of: dict[str, int]) -> None:
        nonlocal begun
        since, begun = begun, None
        if of["generation"] == 0 or (loop := session.loop()) is None:  # the young ones are many and take next to no time
            return
        try:
            if phase == "start":
                begun = loop.moment()
            elif since is not None and (until := loop.moment())[0] - since[0] >= LEAST_NS:
                loop.paused("gc", since, until)
        except Exception as error:
            session.failed(error)

    gc.callbacks.append(collected)


def saving(session: LoopSession) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps what writes a checkpoint; one within another is part of it."""
    nested = False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*arguments: Any, **named: Any) -> Any:
            nonlocal nested
            if nested or is_compiling() or (loop := session.loop()) is None:
                return original(*arguments, **named)
            since: Moment | None = None
            try:
                since = loop.moment()
            except Exception as error:
                session.failed(error)
            before, loop.activity, nested = loop.activity, "idle", True
            try:
                return original(*arguments, **named)
            finally:
                nested, loop.activity = False, before
                if since is not None:
                    session.guarded(partial(saved, loop, since))

        return save

    def saved(loop: LoopTimeline, since: Moment) -> None:
        if (until := loop.moment())[0] - since[0] >= LEAST_NS:
            loop.paused("checkpoint", since, until)

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
                session.guarded(partial(loop.trains if mode else loop.evaluates, id(module)))

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
