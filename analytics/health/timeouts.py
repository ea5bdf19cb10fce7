"""The ladder of timeouts: each must leave time for the one below it, or the wrong one fires first.

A hang that is meant to be named by liveness must not be cut off by a communication timeout before that; a heartbeat must come
several times before its absence means anything; a long phase that is promised must end before the job gives up. Checked when a
job starts, so that nobody finds the right values by trial.

>>> too_early([Timeout("heartbeat period", 0.05), Timeout("frozen", 0.1, factor=3)])
('frozen is 0.1 s and must be at least 3 x heartbeat period (0.05 s): 0.15 s',)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Timeout(msgspec.Struct, frozen=True):
    """A timeout (seconds) that must be at least `factor` times the rung before it."""

    name: str
    seconds: float
    factor: float = 1.0


def too_early(ladder: Sequence[Timeout]) -> tuple[str, ...]:
    """What is wrong, a sentence each: from the quickest rung to the slowest. Empty = every rung is long enough."""
    return tuple(
        f"{rung.name} is {rung.seconds:g} s and must be at least {_times(rung)}{below.name} ({below.seconds:g} s): "
        f"{rung.factor * below.seconds:g} s"
        for below, rung in pairwise(ladder)
        if rung.seconds < rung.factor * below.seconds
    )


def _times(rung: Timeout) -> str:
    return "" if rung.factor == 1 else f"{rung.factor:g} x "
