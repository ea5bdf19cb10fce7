"""For trying out: makes layers of a model on rank 1 take twice as long in a pass, as a bad device would."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from torch import nn


def slow_down(layers: Iterable[nn.Module], part: str, first_call: int) -> None:
    """`part`: forward, backward or nothing; a layer is slow from its call number `first_call` on."""
    if part == "nothing" or os.environ.get("RANK") != "1":
        return
    for layer in layers:
        _Slow(layer, part, first_call)


class _Slow:
    def __init__(self, layer: nn.Module, part: str, first_call: int) -> None:
        self._calls, self._first_call, self._begun_s = 0, first_call, 0.0
        if part == "forward":
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)
        else:
            layer.register_full_backward_pre_hook(self._begin)
            layer.register_full_backward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._begun_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._calls += 1
        if self._calls > self._first_call:
            time.sleep(time.perf_counter() - self._begun_s)
